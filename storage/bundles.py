"""Bundles: committed variants in one file, complete and verified, for clusters without a network.

A bundle is read as a store is, by the same checks. It holds all that its refs need to be loaded, and to be found
cached when they are ensured again, and nothing else. Documents are copied as they are stored, byte for byte.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, BinaryIO, Literal

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.bundle_file import BundleEntry, BundleFilesystem, sorted_entries, write_bundle_file
from graphkiln.storage.bundle_needs import (
    Needs,
    committed_ref,
    needs_of,
    path_of_action,
    path_of_blob,
    path_of_plan,
    path_of_ref,
)
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, StoreUnavailableError
from graphkiln.storage.filesystem import Entry
from graphkiln.storage.pins import RunPin
from graphkiln.storage.readonly import ReadOnlyFilesystem
from graphkiln.storage.records import ActionResult, PlanDocument, RefRecord, VariantName
from graphkiln.storage.results import manifest_of, usable_result
from graphkiln.storage.store import Store

ImportState = Literal["added", "updated", "unchanged", "kept"]

# Is told how many bytes of how many are done.
Progress = Callable[[int, int], None]


class BundledVariant(msgspec.Struct, frozen=True, kw_only=True):
    """A committed variant in a bundle.

    Attributes:
        network: the network's name.
        target: the target's name.
        variant: the variant.
        manifest: digest of its manifest.
        committed_at: when it was committed, with a time zone.
    """

    network: str
    target: str
    variant: Digest
    manifest: Digest
    committed_at: datetime


class ImportedVariant(BundledVariant, frozen=True, kw_only=True):
    """A committed variant in a bundle, and what became of it in the store.

    Attributes:
        state: ``"added"``: the store had none; ``"updated"``: it had an older commit; ``"unchanged"``: it had this
            one; ``"kept"``: it has a newer commit, or another of the same moment, which stays.
    """

    state: ImportState


class Bundled(msgspec.Struct, frozen=True, kw_only=True):
    """What was written to a bundle.

    Attributes:
        bytes: size of the bundle.
        objects: number of stored objects in it.
        variants: its variants.
    """

    bytes: int
    objects: int
    variants: tuple[BundledVariant, ...]


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What an import has done.

    Attributes:
        objects: number of stored objects in the bundle.
        new_objects: how many of them were written.
        variants: what became of each variant.
    """

    objects: int
    new_objects: int
    variants: tuple[ImportedVariant, ...]


def write_bundle(
    store: Store, variants: Iterable[VariantName], out: BinaryIO, progress: Progress | None = None
) -> Bundled:
    """Write committed variants to a bundle. Every object is read and verified on the way.

    Equal variants give equal bytes, in whatever order they are named.

    Raises:
        NotCommittedError: a variant is not committed.
        DamagedStoreError: something that a variant needs is missing or damaged.
        StoreUnavailableError: the store's medium fails.
        OSError: `out` cannot be written.
    """
    snapshot = _Snapshot(store)
    source = Store(snapshot, trust=store.trust)
    names = sorted(set(variants))
    for name in names:
        _settle_plan(source, snapshot, name)
    needs = needs_of(source, names)
    documents = [BundleEntry(path, len(data), digest_bytes(data)) for path, data in snapshot.documents.items()]
    blobs = {BundleEntry(path_of_blob(ref), ref.stored_size, ref.digest) for ref in needs.blobs}
    entries = sorted_entries([*documents, *blobs])
    contents = _counted(_contents(store, snapshot, needs, entries), sum(entry.size for entry in entries), progress)
    size = write_bundle_file(out, entries, contents)
    return Bundled(
        bytes=size,
        objects=len(entries),
        variants=tuple(BundledVariant(**_described(ref)) for ref in needs.refs),
    )


class Bundle:
    """A bundle that has been read and checked from its first byte to its last.

    Attributes:
        refs: the commit points in it.
        size: its size in bytes.
    """

    def __init__(self, file: BinaryIO, name: str, progress: Progress | None = None) -> None:
        """Read and check a bundle, one object at a time.

        Args:
            file: the bundle, which stays open as long as it is used.
            name: what messages call it.
            progress: is told how many bytes of how many are done.

        Raises:
            BadInputError: it is damaged or incomplete, holds something else, or a newer GraphKiln wrote it.
            StoreUnavailableError: it cannot be read.
        """
        self._name = name
        with self._refusing():
            self._files = BundleFilesystem(file, name)
            self._source = Store(self._files)
            needs = needs_of(self._source, self._source.variants(layout.REFS))
            if not needs.refs:
                raise DamagedStoreError("it holds no committed variant", reason="empty-bundle")
            for ref, what in _counted_blobs(needs.blobs, self._files.size, progress):
                self._source.get_blob(ref, what)
            for path in self._files.objects.keys() - needs.paths():
                raise DamagedStoreError(f"nothing in it needs {path}", reason="wrong-path")
        self.refs = tuple(needs.refs)
        self.size = self._files.size

    def __len__(self) -> int:
        return len(self._files.objects)

    def needs_of(self, refs: Iterable[RefRecord]) -> Needs:
        """Return what some of its commit points need.

        Raises:
            BadInputError: the bundle has been changed meanwhile.
        """
        with self._refusing():
            return needs_of(self._source, [(ref.network, ref.target, ref.variant) for ref in refs])

    def read(self, path: str) -> bytes:
        """Return the stored bytes of an object, checked again.

        Raises:
            BadInputError: the bundle has been changed meanwhile.
        """
        with self._refusing():
            return self._source.read_raw(path)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except DamagedStoreError as error:
            raise BadInputError(
                f"the bundle {self._name} cannot be used, and nothing of it was committed: {error}; copy it again",
                reason="damaged-bundle",
            ) from error
        except OSError as error:
            message = f"I/O error at the bundle {self._name}: {error}; check the medium and run again"
            raise StoreUnavailableError(message, reason="bundle-io", retryable=True) from error


def put_bundle(bundle: Bundle, store: Store, progress: Progress | None = None) -> Imported:
    """Put a bundle's variants into a store: first what is named, then what names it, the commit points last.

    What the store has of it already is verified, and written again if it is damaged. A variant of which the store has
    a newer commit is left alone.

    Args:
        bundle: the bundle.
        store: the store, prepared for writing.
        progress: is told how many bytes of how many are done.

    Raises:
        BadInputError: the bundle has been changed since it was checked. No commit point has been moved.
        DamagedStoreError: the store gives back other bytes than were written. No commit point has been moved.
        StoreUnavailableError: the store's medium fails.
        UntrustedError: signatures are required, and something in the bundle has none that is trusted. Nothing was
            written.
    """
    _check_trust(bundle, store)
    states = [(ref, _state(store, ref)) for ref in bundle.refs]
    needs = bundle.needs_of(ref for ref, state in states if state != "kept")
    if not needs.refs:
        return _imported(bundle, store, states, {}, 0)
    pin = RunPin(store, needs.refs[0].variant_name)
    try:
        pin.add(
            actions=[result.key for result in needs.actions],
            blobs=[ref.digest for ref in needs.blobs],
            manifests=[ref.manifest for ref in needs.refs],
        )
        new = _put_needs(bundle, needs, store, progress)
        moved = {ref: _put_ref(store, ref, bundle.read(path_of_ref(ref))) for ref in needs.refs}
    finally:
        pin.close()
    return _imported(bundle, store, states, moved, new)


def _check_trust(bundle: Bundle, store: Store) -> None:
    needs = bundle.needs_of(bundle.refs)
    for ref in needs.refs:
        store.trust.check("ref", bundle.read(path_of_ref(ref)), ref)
    for result in needs.actions:
        store.trust.check("action result", bundle.read(path_of_action(result)), result)


def _put_needs(bundle: Bundle, needs: Needs, store: Store, progress: Progress | None) -> int:
    """Write all that commit points need, and return how many objects were not there."""
    new = 0
    for blob, _ in _counted_blobs(needs.blobs, bundle.size, progress):
        new += store.put_stored(blob, bundle.read(path_of_blob(blob)))
    for result in needs.actions:
        new += _put_action(store, result, bundle)
    store.sync(sorted({path_of_blob(blob) for blob in needs.blobs} | {path_of_action(item) for item in needs.actions}))
    for ref in needs.refs:
        new += _put_manifest(store, ref.manifest, bundle)
    for ref, plan in zip(needs.refs, needs.plans, strict=True):
        new += _put_plan(store, ref, plan, bundle)
    return new


def _imported(
    bundle: Bundle,
    store: Store,
    states: Sequence[tuple[RefRecord, ImportState]],
    moved: Mapping[RefRecord, bool],
    new: int,
) -> Imported:
    # Somebody else may have committed meanwhile, and later than the bundle's commit.
    ended = [(ref, state if moved.get(ref) else _state(store, ref)) for ref, state in states]
    return Imported(
        objects=len(bundle),
        new_objects=new + sum(moved.values()),
        variants=tuple(ImportedVariant(**_described(ref), state=state) for ref, state in ended),
    )


# ---------------------------------------------------------------------- out of a store


class _Snapshot(ReadOnlyFilesystem):
    """A store of which each document is read once: what was checked is what is exported, whoever writes meanwhile."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self.documents: dict[str, bytes] = {}
        self._store = store

    def read(self, path: str) -> bytes:
        """Return the whole object; see the contract."""
        if path not in self.documents:
            self.documents[path] = self._store.read_raw(path)
        return self.documents[path]

    def entries(self, folder: str) -> Iterator[Entry]:
        """Iterate over all objects; see the contract."""
        return self._store.entries(folder)


def _settle_plan(source: Store, snapshot: _Snapshot, variant: VariantName) -> None:
    """Take the manifest's own plan for one that a later run has changed without coming to its commit."""
    ref = committed_ref(source, variant)
    plan = manifest_of(source, ref).plan
    document = source.read_plan(*variant)
    if document is not None and document.plan != plan:
        snapshot.documents[path_of_plan(ref)] = seal("plan", PlanDocument(plan, ref.committed_at, None))


def _contents(store: Store, snapshot: _Snapshot, needs: Needs, entries: Sequence[BundleEntry]) -> Iterator[bytes]:
    blobs: dict[str, list[BlobRef]] = {}
    for ref in needs.blobs:
        blobs.setdefault(path_of_blob(ref), []).append(ref)
    for entry in entries:
        data = snapshot.documents.get(entry.path, b"")
        for ref in blobs.get(entry.path, ()):
            data = store.get_stored(ref, needs.blobs[ref])
        yield data


def _counted(contents: Iterable[bytes], total: int, progress: Progress | None) -> Iterator[bytes]:
    done = 0
    for data in contents:
        yield data
        done += len(data)
        if progress is not None:
            progress(done, total)


# ---------------------------------------------------------------------- into a store


def _state(store: Store, ref: RefRecord) -> ImportState:
    current = store.mend(lambda: store.read_ref(ref.network, ref.target, ref.variant))
    if current is None:
        return "added"
    if current.committed_at < ref.committed_at:
        return "updated"
    return "unchanged" if current.manifest == ref.manifest else "kept"


def _put_action(store: Store, result: ActionResult, bundle: Bundle) -> bool:
    if usable_result(store, result.key) is not None:
        return False  # the first result of an action stays
    path = path_of_action(result)
    stored = store.put_document(path, bundle.read(path), lambda: store.read_action(result.key) is not None)
    store.drop_failure(result.key)
    return stored


def _put_manifest(store: Store, digest: Digest, bundle: Bundle) -> bool:
    path = layout.by_digest(layout.MANIFESTS, digest)
    stored = store.put_document(path, bundle.read(path), lambda: store.read_manifest(digest))
    store.read_manifest(digest)
    return stored


def _put_plan(store: Store, ref: RefRecord, document: PlanDocument, bundle: Bundle) -> bool:
    def stays() -> bool:
        current = store.read_plan(ref.network, ref.target, ref.variant)
        return current is not None and (current.plan == document.plan or current.created_at > ref.committed_at)

    return store.put_document(path_of_plan(ref), bundle.read(path_of_plan(ref)), stays)


def _put_ref(store: Store, ref: RefRecord, data: bytes) -> bool:
    moved = store.put_document(path_of_ref(ref), data, lambda: _state(store, ref) in ("unchanged", "kept"))
    if moved:
        store.trust.remember(store.url, ref)
    return moved


def _counted_blobs(blobs: dict[BlobRef, str], size: int, progress: Progress | None) -> Iterator[tuple[BlobRef, str]]:
    done = 0
    for ref, what in blobs.items():
        yield ref, what
        done += ref.stored_size
        if progress is not None:
            progress(done, size)
    if progress is not None:
        progress(size, size)


def _described(ref: RefRecord) -> dict[str, Any]:
    return {name: getattr(ref, name) for name in BundledVariant.__struct_fields__}
