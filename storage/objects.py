"""Objects on a file system: blobs and sealed documents, checked on every read, with damage set aside.

A read gives what was written, or None where nothing is, or raises `DamagedStoreError`. A caller that is about
to make missing things anyway passes through `ObjectStore.mend`, which moves the damaged object to quarantine,
warns, and answers None.
"""

import contextlib
import errno
import logging
import secrets
from collections.abc import Callable, Container, Iterator
from datetime import UTC, datetime
from typing import TypeVar

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef, decode, encode
from graphkiln.storage.digests import Digest
from graphkiln.storage.documents import Body, seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, StoreUnavailableError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.records import QuarantineNote

# A writer that loses this many compare-and-set races in a row is not racing, but broken.
REPLACE_TRIES = 100

# Each try but the first has found damage and set it aside; somebody else may have done the same meanwhile.
CREATE_TRIES = 3

_log = logging.getLogger("graphkiln")

Found = TypeVar("Found")


class ObjectStore:
    """Blobs, and documents at given paths. Safe to share between threads."""

    def __init__(self, filesystem: StoreFilesystem, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._fs = filesystem
        self._now = now

    @property
    def url(self) -> str:
        """Where the store is, without a password."""
        return self._fs.url

    def mend(self, read: Callable[[], Found]) -> Found | None:
        """Return what `read` returns; if it finds damage twice, quarantine that, warn, and return None.

        What was damaged on its way here, and what somebody else has mended meanwhile, is whole the second time.
        """
        try:
            return read()
        except DamagedStoreError as error:
            first, stored = error, self._stored(error.path)
        try:
            found = read()
        except DamagedStoreError as error:
            _log.warning("%s: it will be made again", error)
            if error.path and error.path == first.path:
                self._set_aside(error, stored)
            return None
        _log.warning("%s; read again, it is whole", first)
        return found

    def _stored(self, path: str) -> bytes | None:
        """Return the stored bytes of an object; None if there is none, or something else in its place."""
        try:
            return self.read_raw(path)
        except (FileNotFoundError, DamagedStoreError):
            return None

    def _set_aside(self, error: DamagedStoreError, stored: bytes | None) -> None:
        # The folders are kept: one name made of all of them could be longer than file systems take.
        place = f"{layout.QUARANTINE}/{error.path}.{secrets.token_hex(8)}"
        note = QuarantineNote(path=error.path, reason=str(error), found_at=self._now())
        with self._medium(error.path):
            if self._fs.move(error.path, place, expected=stored):
                self._fs.create(f"{place}.note", seal("quarantine note", note))

    def names(self, folder: str) -> Iterator[str]:
        """Iterate over the paths of all objects below a folder, temporaries of killed writers included."""
        with self._medium(folder):
            yield from self._fs.names(folder)

    def read_raw(self, path: str) -> bytes:
        """Return the stored bytes of any object, unchecked: for those who check them.

        Raises:
            FileNotFoundError: there is none.
            DamagedStoreError: something else is in its place.
        """
        with self._medium(path, absence_is_a_fault=False), self._about(path, "an object"):
            return self._fs.read(path)

    def sync(self, paths: list[str]) -> None:
        """Return once the objects at `paths` would survive a loss of power.

        Raises:
            StoreUnavailableError: the medium fails, or one of them is gone.
        """
        with self._medium("a commit"):
            self._fs.sync(paths)

    def put_blob(self, content: bytes, *, known: Container[Digest] = ()) -> BlobRef:
        """Store some content and return its reference. A damaged blob in its place is set aside.

        Args:
            content: the content.
            known: blobs that were stored before; if one of them is not there any more, a warning says so.

        Raises:
            StoreUnavailableError: the medium fails, or what is written is damaged again and again.
        """
        ref, stored = encode(content)
        path = layout.by_digest(layout.BLOBS, ref.digest)
        if self._create_or_mend(path, stored, lambda: self.get_blob(ref, "a blob")) and ref.digest in known:
            _log.warning("%s/%s was missing: it has been written again", self.url, path)
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

    def _read_document(self, path: str, kind: str, body_type: type[Body]) -> Body | None:
        with self._about(path, f"the {kind}"):
            try:
                data = self.read_raw(path)
            except FileNotFoundError:
                return None
            return unseal(data, kind, body_type)

    def _create_or_mend(self, path: str, data: bytes, read: Callable[[], object]) -> bool:
        """Write an object that is named by its digest, unless `read` finds it whole.

        Returns:
            Whether nothing at all was there, damage included.
        """
        for attempt in range(CREATE_TRIES):
            with self._medium(path):
                if self._fs.create(path, data):
                    return attempt == 0
            if self.mend(read) is not None:
                return False
        message = f"{self.url}/{path} was damaged {CREATE_TRIES} times in a row: check the medium and run again"
        raise StoreUnavailableError(message, reason="contended", retryable=True)

    def _drop(self, path: str, kind: str) -> None:
        def delete() -> None:
            with self._medium(path), self._about(path, f"the {kind}"):
                self._fs.delete(path)

        self.mend(delete)

    def _replace(self, path: str, data: bytes) -> None:
        for _ in range(REPLACE_TRIES):
            try:
                current = self.mend(lambda: self.read_raw(path))
            except FileNotFoundError:
                current = None
            with self._medium(path):
                if current == data or self._fs.replace(path, data, expected=current):
                    return
        raise self._contended(path)

    def _misplaced(self, path: str, belongs_to: str) -> DamagedStoreError:
        message = f"{self.url}/{path} is damaged: it belongs to {belongs_to}"
        return DamagedStoreError(message, reason="misplaced", path=path)

    def _contended(self, path: str) -> StoreUnavailableError:
        message = f"{self.url}/{path} was changed by others {REPLACE_TRIES} times in a row: run again"
        return StoreUnavailableError(message, reason="contended", retryable=True)

    @contextlib.contextmanager
    def _about(self, path: str, what: str) -> Iterator[None]:
        """Say of every damage where it is and what was wanted."""
        try:
            yield
        except DamagedStoreError as error:
            if error.path:
                raise
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
