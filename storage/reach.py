"""What of a store is needed, and by whom: every path that refs, plans, manifests, actions and pins lead to."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.pins import pins_of
from graphkiln.storage.records import ActionResult, Manifest, PinRecord, Plan, PlanDocument, RefRecord, VariantName
from graphkiln.storage.store import Store

Found = TypeVar("Found")

_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class VariantRoots:
    """What a variant's own documents say, and what they need.

    Attributes:
        ref: its commit point, if it is committed and whole.
        used_at: when a run last compiled, committed or used it.
        needs: every path that it needs, its own documents included.
    """

    ref: RefRecord | None
    used_at: datetime
    needs: frozenset[str]


@dataclass(frozen=True)
class Roots:
    """Everything from which objects are needed, as it is at one moment.

    Attributes:
        variants: every variant that has a plan or a ref.
        pins: every pin that holds, by path.
        pinned: what the pins need, themselves included, but not the variants that they name.
    """

    variants: Mapping[VariantName, VariantRoots]
    pins: Mapping[str, PinRecord]
    pinned: frozenset[str]

    @functools.cached_property
    def held(self) -> frozenset[VariantName]:
        """The variants that a pin holds, whatever their documents name."""
        pins = (pin for path, pin in self.pins.items() if not path.startswith(f"{layout.MANIFEST_PINS}/"))
        return frozenset((pin.network, pin.target, Digest(pin.variant)) for pin in pins)

    def needed(self, without: Iterable[VariantName] = ()) -> set[str]:
        """Return every path that is needed.

        Args:
            without: variants that are given up.
        """
        needed = set(self.pinned)
        for name in self.variants.keys() - set(without):
            needed |= self.variants[name].needs
        return needed


@dataclass
class Reach:
    """Follows names through a store. Manifests that were found are read once; others may yet be written."""

    store: Store
    _manifests: dict[Digest, Manifest] = field(default_factory=dict)
    _actions: dict[Digest, ActionResult] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)
    _lost_refs: bool = False

    def roots(self, since: datetime) -> Roots:
        """Read all pins, plans and refs, in an order in which nothing that a run moves from one to the other is lost.

        Args:
            since: manifests that were replaced after this are still needed.

        Raises:
            DamagedStoreError: a pin cannot be read, so that nobody knows what it was to keep.
        """
        pins = dict(pins_of(self.store))
        names = {*self.store.variants(layout.PLANS), *self.store.variants(layout.REFS)}
        self._failed = set(self.store.names(layout.FAILURES))
        self._lost_refs = False
        self._actions.clear()  # a result that was lost is made anew under the same key
        variants = {name: self._of_variant(name, since) for name in sorted(names)}
        pinned = set(pins).union(*(self._of_pin(pin) for pin in pins.values()))
        if self._lost_refs:
            # Nobody knows which manifest a damaged ref names: all are kept until it is mended.
            digests = (layout.digest_of(path) for path in list(self.store.names(layout.MANIFESTS)))
            pinned = pinned.union(*(self.of_manifest(digest) for digest in digests if digest is not None))
        return Roots(variants, pins, frozenset(pinned))

    def of_manifest(self, digest: Digest) -> set[str]:
        """Return what a manifest needs, itself included; only itself if it is damaged or missing."""
        needs = {layout.by_digest(layout.MANIFESTS, digest)}
        manifest = self.manifest(digest)
        if manifest is not None:
            needs |= self._of_plan(manifest.plan)
            for outputs in manifest.artifacts.values():
                needs |= _blobs(outputs.values())
        return needs

    def manifest(self, digest: Digest) -> Manifest | None:
        """Return a manifest, or None if it is damaged or missing."""
        manifest = self._manifests.get(digest) or _whole(lambda: self.store.read_manifest(digest))
        if manifest is not None:
            self._manifests[digest] = manifest
        return manifest

    def _of_variant(self, name: VariantName, since: datetime) -> VariantRoots:
        needs = {layout.by_variant(folder, *name) for folder in (layout.PLANS, layout.REFS)}
        used_at = _LONG_AGO
        document: PlanDocument | None = _whole(lambda: self.store.read_plan(*name))
        if document is not None:
            used_at = max(document.created_at, document.used_at or document.created_at)
            needs |= self._of_plan(document.plan) | _blobs([document.previous] if document.previous else [])
        ref: RefRecord | None = None
        try:
            ref = _read_twice(functools.partial(self.store.read_ref, *name))
        except DamagedStoreError:
            self._lost_refs = True
        if ref is not None:
            used_at = max(used_at, ref.committed_at)
            recent = [item.manifest for item in ref.superseded if item.at > since]
            for manifest in (ref.manifest, *recent):
                needs |= self.of_manifest(manifest)
        return VariantRoots(ref, used_at, frozenset(needs))

    def _of_plan(self, plan: Plan) -> set[str]:
        needs = _blobs(graph.payload for graph in plan.graphs) | self._of_actions([graph.key for graph in plan.graphs])
        for graph in plan.graphs:
            path = layout.by_digest(layout.FAILURES, graph.key)
            if path in self._failed:
                failure = _whole(functools.partial(self.store.read_failure, graph.key))
                needs |= {path} | _blobs([failure.log] if failure is not None and failure.log else [])
        return needs

    def _of_actions(self, keys: Sequence[Digest]) -> set[str]:
        unknown = [key for key in keys if key not in self._actions]
        found = self.store.read_actions(unknown)
        # Those that were damaged on their way are left out.
        again = {key: _whole(functools.partial(self.store.read_action, key)) for key in unknown if key not in found}
        self._actions.update({key: result for key, result in (found | again).items() if result is not None})
        needs = {layout.by_digest(layout.ACTIONS, key) for key in keys}
        for key in keys:
            result = self._actions.get(key)
            if result is not None:
                needs |= _blobs([*result.outputs.values(), *([result.log] if result.log else [])])
        return needs

    def _of_pin(self, pin: PinRecord) -> set[str]:
        needs = {layout.by_digest(layout.BLOBS, digest) for digest in pin.blobs}
        for manifest in pin.manifests:
            needs |= self.of_manifest(manifest)
        return needs | self._of_actions(pin.actions)


def _blobs(refs: Iterable[BlobRef]) -> set[str]:
    return {layout.by_digest(layout.BLOBS, ref.digest) for ref in refs}


def _whole(read: Callable[[], Found | None]) -> Found | None:
    """Return what is read; None if it is damaged, and not only on its way here: it will be made again."""
    try:
        return _read_twice(read)
    except DamagedStoreError:
        return None


def _read_twice(read: Callable[[], Found]) -> Found:
    try:
        return read()
    except DamagedStoreError:
        return read()
