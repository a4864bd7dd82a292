"""Reading a whole store and saying what is wrong with it. Nothing is changed."""

import functools
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import Digest, digest_bytes, is_digest
from graphkiln.storage.documents import unseal
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.local import TEMPORARY_PREFIX
from graphkiln.storage.records import Plan, QuarantineNote
from graphkiln.storage.results import manifest_of, missing_from
from graphkiln.storage.store import Store

Found = TypeVar("Found")


class Problem(msgspec.Struct, frozen=True, order=True):
    """Something that a verification found.

    Attributes:
        path: the object.
        severity: ``"damage"`` is a missing or altered object, which the next compile makes again; ``"leftover"``
            is what a killed run left, which hurts nobody.
        message: what is wrong.
    """

    path: str
    severity: Literal["damage", "leftover"]
    message: str


class Verification(msgspec.Struct, frozen=True):
    """What was looked at, and what was found.

    Attributes:
        objects: number of stored objects that were read.
        committed: number of refs.
        problems: sorted by path.
    """

    objects: int
    committed: int
    problems: tuple[Problem, ...]

    @property
    def damaged(self) -> bool:
        """Whether anything is damaged."""
        return any(problem.severity == "damage" for problem in self.problems)


def verify_store(store: Store) -> Verification:
    """Read every object of the store, and check everything that one says of another.

    Raises:
        BadInputError: a newer GraphKiln wrote the store.
        StoreUnavailableError: the medium fails.
    """
    return _Verifier(store).run()


class _Verifier:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._problems: dict[tuple[str, str], Problem] = {}
        self._objects = 0
        self._read: set[BlobRef] = set()
        self._committed: set[tuple[str, str, Digest]] = set()
        self._referenced: set[Digest] = set()

    def run(self) -> Verification:
        self._check(self._store.read_format)
        for variant in self._store.variants(layout.REFS):
            ref = self._check(functools.partial(self._store.read_ref, *variant))
            if ref is not None:
                self._referenced.add(ref.manifest)
        for path in list(self._store.names("")):
            if path.startswith(f"{layout.QUARANTINE}/"):
                self._look_at_quarantine(path)
                continue
            self._objects += 1
            if path.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
                self._note(path, "leftover", "a temporary of a writer that was killed, or is at work")
            else:
                self._look_at(path)
        self._look_for_lost_refs()
        return Verification(self._objects, len(self._committed), tuple(sorted(self._problems.values())))

    def _look_at(self, path: str) -> None:
        folder, _, rest = path.partition("/")
        name = Digest(rest.rpartition("/")[2])
        parents = rest.split("/")[:-1]
        if folder in (layout.PLANS, layout.REFS) and len(parents) == 2 and _are_names(*parents) and is_digest(name):
            network, target = parents
            (self._look_at_plan if folder == layout.PLANS else self._look_at_ref)(network, target, name)
        elif folder in _BY_DIGEST and is_digest(name) and path == layout.by_digest(folder, name):
            _BY_DIGEST[folder](self, name)
        elif path != layout.FORMAT:
            self._note(path, "leftover", "not an object of a store")

    def _look_at_blob(self, name: Digest) -> None:
        path = layout.by_digest(layout.BLOBS, name)
        stored = self._raw(path)
        if stored is not None and digest_bytes(stored) != name:
            self._note(path, "damage", f"{self._store.url}/{path} is damaged: its bytes do not match its name")

    def _look_at_action(self, key: Digest) -> None:
        result = self._check(lambda: self._store.read_action(key))
        if result is not None:
            self._blobs(result.outputs.values(), f"an output of the action {key}")
            self._blobs([result.log] if result.log else [], f"the log of the action {key}")

    def _look_at_failure(self, key: Digest) -> None:
        failure = self._check(lambda: self._store.read_failure(key))
        if failure is not None and failure.log is not None:
            self._blobs([failure.log], f"the log of the failed action {key}")

    def _look_at_plan(self, network: str, target: str, variant: Digest) -> None:
        document = self._check(lambda: self._store.read_plan(network, target, variant))
        if document is not None:
            self._payloads(document.plan)
            self._blobs([document.previous] if document.previous else [], f"the plan before {document.plan.title()}")

    def _look_at_manifest(self, digest: Digest) -> None:
        manifest = self._check(lambda: self._store.read_manifest(digest))
        # One that a later commit has replaced may name what was lost since: that is why it was replaced.
        if manifest is not None and digest in self._referenced:
            self._payloads(manifest.plan)
            for graph, outputs in manifest.artifacts.items():
                self._blobs(outputs.values(), f"the artifact of {graph} in {manifest.plan.title()}")

    def _look_at_ref(self, network: str, target: str, variant: Digest) -> None:
        self._committed.add((network, target, variant))
        ref = self._check(lambda: self._store.read_ref(network, target, variant))
        if ref is None:
            return
        manifest = self._check(lambda: manifest_of(self._store, ref))
        if manifest is None:
            return
        self._look_at_manifest(ref.manifest)
        for lost in missing_from(self._store, manifest):
            self._note(lost.path, "damage", str(lost))

    def _look_for_lost_refs(self) -> None:
        for path in self._store.names(layout.MANIFESTS):
            name = Digest(path.rpartition("/")[2])
            manifest = self._check(functools.partial(self._store.read_manifest, name)) if is_digest(name) else None
            if manifest is None:
                continue
            plan = manifest.plan
            variant = (plan.network.name, plan.target.name, plan.variant)
            # A folder in the place of a ref is not listed, and is damage none the less.
            if variant not in self._committed and self._absent(functools.partial(self._store.read_ref, *variant)):
                ref = layout.by_variant(layout.REFS, *variant)
                message = (
                    f"{plan.title()} has a manifest but no ref: it was lost, or a commit was killed; compile again"
                )
                self._note(ref, "leftover", message)

    def _look_at_quarantine(self, path: str) -> None:
        data = self._raw(path) if path.endswith(".note") else None
        if data is not None:
            try:
                note = unseal(data, "quarantine note", QuarantineNote)
            except DamagedStoreError as error:
                self._note(path, "leftover", f"a quarantine note that cannot be read: {error}")
            else:
                self._note(path, "leftover", f"set aside on {note.found_at:%Y-%m-%d %H:%M:%S}: {note.reason}")

    def _payloads(self, plan: Plan) -> None:
        for graph in plan.graphs:
            self._blobs([graph.payload], f"the payload of {graph.name} in {plan.title()}")

    def _blobs(self, refs: Iterable[BlobRef], what: str) -> None:
        new = dict.fromkeys(ref for ref in refs if ref not in self._read)
        self._read.update(new)
        for error in self._store.damage_of([(ref, what) for ref in new]):
            self._note(error.path, "damage", str(error))

    def _raw(self, path: str) -> bytes | None:
        """Return what is stored, or None if somebody has taken it away since its name was read."""
        try:
            return self._check(lambda: self._store.read_raw(path))
        except FileNotFoundError:
            return None

    def _absent(self, read: Callable[[], object]) -> bool:
        try:
            return read() is None
        except DamagedStoreError as error:
            self._note(error.path, "damage", str(error))
            return False

    def _check(self, read: Callable[[], Found]) -> Found | None:
        try:
            return read()
        except DamagedStoreError as error:
            self._note(error.path, "damage", str(error))
            return None

    def _note(self, path: str, severity: Literal["damage", "leftover"], message: str) -> None:
        self._problems.setdefault((path, severity), Problem(path, severity, message))


def _are_names(*names: str) -> bool:
    return all(layout.is_name(name) for name in names)


_BY_DIGEST: dict[str, Callable[[_Verifier, Digest], None]] = {
    layout.BLOBS: _Verifier._look_at_blob,
    layout.ACTIONS: _Verifier._look_at_action,
    layout.FAILURES: _Verifier._look_at_failure,
    layout.MANIFESTS: _Verifier._look_at_manifest,
}
