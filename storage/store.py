"""The store: blobs and documents on a file system, checked on every read.

A read gives what was written, or None where nothing is, or raises `DamagedStoreError`. A caller that is about
to make missing things anyway passes through `Store.mend`, which moves the damaged object to quarantine, warns,
and answers None. Nothing here decides what to compile.
"""

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Callable, Container, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef, decode, encode
from graphkiln.storage.digests import ALGORITHM, Digest, digest_bytes, is_digest
from graphkiln.storage.documents import Body, seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, StoreUnavailableError
from graphkiln.storage.filesystem import StoreFilesystem, open_filesystem
from graphkiln.storage.local import TEMPORARY_PREFIX
from graphkiln.storage.records import (
    ActionResult,
    FailureRecord,
    Manifest,
    PlanDocument,
    QuarantineNote,
    RefRecord,
    StoreFormat,
)

FORMAT_VERSION = 1

# A writer that loses this many compare-and-set races in a row is not racing, but broken.
_REPLACE_TRIES = 100

_log = logging.getLogger("graphkiln")

Found = TypeVar("Found")
VariantName = tuple[str, str, Digest]


def default_url() -> str:
    """Return the store that is used when none is named: ``$GRAPHKILN_STORE``, else the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return os.environ.get("GRAPHKILN_STORE") or str(cache / "graphkiln")


def open_store(url: str | None = None, options: Mapping[str, Any] | None = None, *, checked: bool = True) -> "Store":
    """Return a store, which need not exist yet; nothing is written.

    Args:
        url: where it is; `default_url()` if None.
        options: what fsspec passes to the file system.
        checked: whether to read the store's format; only a verification does without.

    Raises:
        BadInputError: the URL cannot be opened, or a newer GraphKiln wrote the store.
        DamagedStoreError: the store's format file is damaged, or missing though the store is in use.
        StoreUnavailableError: the medium fails.
    """
    store = Store(open_filesystem(url or default_url(), options))
    if checked:
        store.read_format()
    return store


def open_for_writing(url: str | None = None, options: Mapping[str, Any] | None = None) -> "Store":
    """Return a store that can be written; a damaged format file is written again, with a warning.

    Raises:
        BadInputError: the URL cannot be opened, the store cannot be written, or a newer GraphKiln wrote it.
        StoreUnavailableError: the medium fails.
    """
    store = Store(open_filesystem(url or default_url(), options))
    store.prepare_for_writing()
    return store


class Store:
    """Blobs, actions, failures, plans, manifests and refs. Safe to share between threads."""

    def __init__(self, filesystem: StoreFilesystem, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._fs = filesystem
        self._now = now

    @property
    def url(self) -> str:
        """Where the store is, without a password."""
        return self._fs.url

    # ------------------------------------------------------------------ the store as a whole

    def read_format(self) -> StoreFormat | None:
        """Return what the store is written in, or None if it is empty.

        Raises:
            BadInputError: a newer GraphKiln wrote it.
            DamagedStoreError: the format file is damaged, or missing though there are refs or plans.
        """
        found = self._read_document(layout.FORMAT, "store format", StoreFormat)
        if found is None:
            if any(True for folder in (layout.REFS, layout.PLANS) for _ in self.names(folder)):
                raise DamagedStoreError(
                    f"{self.url}/{layout.FORMAT} is missing, though the store is in use",
                    reason="missing",
                    path=layout.FORMAT,
                )
        elif found.format > FORMAT_VERSION or found.digest != ALGORITHM:
            raise BadInputError(
                f"the store {self.url} has format {found.format} with {found.digest} digests, and this GraphKiln "
                f"reads up to format {FORMAT_VERSION} with {ALGORITHM}: upgrade GraphKiln, or use another store",
                reason="newer-format",
            )
        return found

    def prepare_for_writing(self) -> None:
        """Make sure that the store can be written, and write its format file if it has none (any more).

        Raises:
            BadInputError: it cannot be written, or a newer GraphKiln wrote it.
        """
        probe = f"{TEMPORARY_PREFIX}probe-{secrets.token_hex(8)}"
        with self._medium(probe):
            try:
                self._fs.create(probe, b"")
            except FileNotFoundError as error:  # a parent folder cannot be made, as below /proc
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from error
            self._fs.delete(probe)
        if self.mend(self.read_format) is None:
            wanted = seal("store format", StoreFormat(FORMAT_VERSION, ALGORITHM))
            with self._medium(layout.FORMAT):
                self._fs.replace(layout.FORMAT, wanted, expected=None)
            self.read_format()

    def mend(self, read: Callable[[], Found]) -> Found | None:
        """Return what `read` returns; if it finds damage, quarantine that, warn, and return None."""
        try:
            return read()
        except DamagedStoreError as error:
            self.quarantine(error)
            return None

    def quarantine(self, error: DamagedStoreError) -> None:
        """Move the object that `error` is about out of the way, and warn."""
        _log.warning("%s: it will be made again", error)
        if not error.path:
            return
        # The folders are kept: one name made of all of them could be longer than file systems take.
        place = f"{layout.QUARANTINE}/{error.path}.{secrets.token_hex(4)}"
        note = QuarantineNote(path=error.path, reason=str(error), found_at=self._now())
        with self._medium(error.path):
            if self._fs.move(error.path, place):
                self._fs.create(f"{place}.note", seal("quarantine note", note))

    def names(self, folder: str) -> Iterator[str]:
        """Iterate over the paths of all objects below a folder, temporaries of killed writers included."""
        with self._medium(folder):
            yield from self._fs.names(folder)

    def read_raw(self, path: str) -> bytes:
        """Return the stored bytes of any object, unchecked: for those who check them.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._medium(path, absence_is_a_fault=False):
            return self._fs.read(path)

    def sync(self, paths: list[str]) -> None:
        """Return once the objects at `paths` would survive a loss of power.

        Raises:
            StoreUnavailableError: the medium fails, or one of them is gone.
        """
        with self._medium("a commit"):
            self._fs.sync(paths)

    # ------------------------------------------------------------------ blobs

    def put_blob(self, content: bytes, *, known: Container[Digest] = ()) -> BlobRef:
        """Store some content and return its reference. A damaged blob in its place is set aside.

        Args:
            content: the content.
            known: blobs that were stored before; if one of them is not there any more, a warning says so.
        """
        ref, stored = encode(content)
        path = layout.by_digest(layout.BLOBS, ref.digest)
        with self._medium(path):
            if self._fs.create(path, stored):
                if ref.digest in known:
                    _log.warning("%s/%s was missing: it has been written again", self.url, path)
            elif self.mend(lambda: self.get_blob(ref, "a blob")) is None:
                self._fs.create(path, stored)
        return ref

    def get_blob(self, ref: BlobRef, what: str) -> bytes:
        """Return the content of a blob, once every digest matched.

        Args:
            ref: the blob.
            what: what it is to the reader, for the message.

        Raises:
            DamagedStoreError: it is missing or does not match.
        """
        path = layout.by_digest(layout.BLOBS, ref.digest)
        with self._about(path, what):
            try:
                return decode(ref, self.read_raw(path))
            except FileNotFoundError:
                raise DamagedStoreError("it is missing", reason="missing") from None

    # ------------------------------------------------------------------ actions and failures

    def read_action(self, key: Digest) -> ActionResult | None:
        """Return the result of an action, or None. Its blobs are not checked by this."""
        path = layout.by_digest(layout.ACTIONS, key)
        result = self._read_document(path, "action result", ActionResult)
        if result is not None and result.key != key:
            raise self._misplaced(path, f"the action {result.key}")
        return result

    def write_action(self, result: ActionResult) -> ActionResult:
        """Store the result of an action; the first writer wins.

        Returns:
            The result that is stored now.
        """
        path = layout.by_digest(layout.ACTIONS, result.key)
        data = seal("action result", result)
        for _ in range(_REPLACE_TRIES):
            with self._medium(path):
                if self._fs.create(path, data):
                    return result
            found = self.mend(lambda: self.read_action(result.key))
            if found is not None:
                return found
        raise self._contended(path)

    def replace_action(self, result: ActionResult) -> None:
        """Store the result of an action in place of the one that is there."""
        self._replace(layout.by_digest(layout.ACTIONS, result.key), seal("action result", result))

    def drop_action(self, key: Digest) -> None:
        """Forget the result of an action, because something that it names is lost."""
        path = layout.by_digest(layout.ACTIONS, key)
        with self._medium(path):
            self._fs.delete(path)

    def read_failure(self, key: Digest) -> FailureRecord | None:
        """Return how an action last failed, or None."""
        path = layout.by_digest(layout.FAILURES, key)
        failure = self._read_document(path, "failure record", FailureRecord)
        if failure is not None and failure.key != key:
            raise self._misplaced(path, f"the action {failure.key}")
        return failure

    def write_failure(self, failure: FailureRecord) -> None:
        """Store how an action failed, in place of how it failed before."""
        self._replace(layout.by_digest(layout.FAILURES, failure.key), seal("failure record", failure))

    def drop_failure(self, key: Digest) -> None:
        """Forget how an action failed, because it has succeeded."""
        path = layout.by_digest(layout.FAILURES, key)
        with self._medium(path):
            self._fs.delete(path)

    # ------------------------------------------------------------------ plans, manifests, refs

    def read_plan(self, network: str, target: str, variant: Digest) -> PlanDocument | None:
        """Return the plan of a variant, or None."""
        path = layout.by_variant(layout.PLANS, network, target, variant)
        document = self._read_document(path, "plan", PlanDocument)
        if document is not None:
            plan = document.plan
            if (plan.network.name, plan.target.name, plan.variant) != (network, target, variant):
                raise self._misplaced(path, plan.title())
        return document

    def write_plan(self, document: PlanDocument) -> None:
        """Store a plan in place of the one that the variant had."""
        plan = document.plan
        path = layout.by_variant(layout.PLANS, plan.network.name, plan.target.name, plan.variant)
        self._replace(path, seal("plan", document))

    def read_manifest(self, digest: Digest) -> Manifest:
        """Return a manifest.

        Raises:
            DamagedStoreError: it is missing or does not match its digest.
        """
        path = layout.by_digest(layout.MANIFESTS, digest)
        with self._about(path, "a manifest"):
            try:
                data = self.read_raw(path)
            except FileNotFoundError:
                raise DamagedStoreError("it is missing", reason="missing") from None
            if digest_bytes(data) != digest:
                raise DamagedStoreError("its bytes do not match its digest", reason="wrong-digest")
            manifest = unseal(data, "manifest", Manifest)
            planned = {graph.name for graph in manifest.plan.graphs}
            if planned != manifest.artifacts.keys() or not all(manifest.artifacts.values()):
                raise DamagedStoreError("it does not name an artifact for each kernel graph", reason="incomplete")
            return manifest

    def holds_manifest(self, manifest: Manifest) -> bool:
        """Tell whether a manifest has been stored before, however it is now."""
        try:
            self.read_raw(layout.by_digest(layout.MANIFESTS, digest_bytes(seal("manifest", manifest))))
        except FileNotFoundError:
            return False
        return True

    def write_manifest(self, manifest: Manifest) -> Digest:
        """Durably store a manifest and return its digest. What it names must be durable already."""
        data = seal("manifest", manifest)
        digest = digest_bytes(data)
        path = layout.by_digest(layout.MANIFESTS, digest)
        with self._medium(path):
            if not self._fs.create(path, data) and self.mend(lambda: self.read_manifest(digest)) is None:
                self._fs.create(path, data)
        self.sync([path])
        return digest

    def read_ref(self, network: str, target: str, variant: Digest) -> RefRecord | None:
        """Return the commit point of a variant, or None."""
        path = layout.by_variant(layout.REFS, network, target, variant)
        ref = self._read_document(path, "ref", RefRecord)
        if ref is not None and (ref.network, ref.target, ref.variant) != (network, target, variant):
            raise self._misplaced(path, f"{ref.network} for {ref.target} (variant {ref.variant[:12]})")
        return ref

    def write_ref(self, ref: RefRecord) -> None:
        """Durably move the commit point of a variant. Its manifest must be durable already."""
        path = layout.by_variant(layout.REFS, ref.network, ref.target, ref.variant)
        self._replace(path, seal("ref", ref))

    def variants(self, folder: str, network: str | None = None, target: str | None = None) -> list[VariantName]:
        """Return (network, target, variant) of every plan or ref.

        Args:
            folder: `layout.PLANS` or `layout.REFS`.
            network: only of this network.
            target: only of this target; needs `network`.
        """
        below = folder
        if network is not None:
            below = f"{folder}/{layout.check_name('network', network)}"
            if target is not None:
                below = layout.by_target(folder, network, target)
        found = [path.split("/")[1:] for path in self.names(below)]
        return [
            (item[0], item[1], Digest(item[2]))
            for item in found
            if len(item) == 3 and layout.is_name(item[0]) and layout.is_name(item[1]) and is_digest(item[2])
        ]

    # ------------------------------------------------------------------ faults

    def _read_document(self, path: str, kind: str, body_type: type[Body]) -> Body | None:
        try:
            data = self.read_raw(path)
        except FileNotFoundError:
            return None
        with self._about(path, f"the {kind}"):
            return unseal(data, kind, body_type)

    def _replace(self, path: str, data: bytes) -> None:
        for _ in range(_REPLACE_TRIES):
            with self._medium(path):
                try:
                    current = self._fs.read(path)
                except FileNotFoundError:
                    current = None
                if current == data or self._fs.replace(path, data, expected=current):
                    return
        raise self._contended(path)

    def _misplaced(self, path: str, belongs_to: str) -> DamagedStoreError:
        message = f"{self.url}/{path} is damaged: it belongs to {belongs_to}"
        return DamagedStoreError(message, reason="misplaced", path=path)

    def _contended(self, path: str) -> StoreUnavailableError:
        message = f"{self.url}/{path} was changed by others {_REPLACE_TRIES} times in a row: run again"
        return StoreUnavailableError(message, reason="contended", retryable=True)

    @contextlib.contextmanager
    def _about(self, path: str, what: str) -> Iterator[None]:
        """Say of every damage where it is and what was wanted."""
        try:
            yield
        except DamagedStoreError as error:
            message = f"{self.url}/{path} ({what}) is {'missing' if error.reason == 'missing' else f'damaged: {error}'}"
            raise DamagedStoreError(message, reason=error.reason, path=path) from error
        except BadInputError as error:
            raise BadInputError(f"{self.url}/{path} ({what}): {error}", reason=error.reason) from error

    @contextlib.contextmanager
    def _medium(self, path: str, *, absence_is_a_fault: bool = True) -> Iterator[None]:
        """Turn the faults of the medium into errors that say what to do."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not absence_is_a_fault:
                raise
            where = f"{self.url}/{path}"
            # Not every file system behind fsspec sets the number.
            if isinstance(error, PermissionError | NotADirectoryError | FileExistsError) or error.errno == errno.EROFS:
                raise BadInputError(
                    f"the store {self.url} cannot be used: {error.strerror or error} at {where}; "
                    "make it accessible, or name another one with --store or GRAPHKILN_STORE",
                    reason="store-not-accessible",
                ) from error
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise StoreUnavailableError(
                f"{'no space left for' if full else 'I/O error at'} {where}: {error}; "
                f"{'free some space' if full else 'check the medium'} and run again",
                reason="disk-full" if full else "store-io",
                retryable=True,
            ) from error
