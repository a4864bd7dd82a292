"""Objects on a file system: blobs and sealed documents, checked on every read, with damage set aside.

A read gives what was written, or None where nothing is, or raises `DamagedStoreError`. A caller that is about
to make missing things anyway passes through `ObjectStore.mend`, which moves the damaged object to quarantine,
warns, and answers None.
"""

import contextlib
import errno
import functools
import logging
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef, decode, encode
from graphkiln.storage.digests import Digest
from graphkiln.storage.documents import Body, seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, StoreUnavailableError
from graphkiln.storage.filesystem import Hashed, Stored, StoreFilesystem
from graphkiln.storage.records import QuarantineNote

if TYPE_CHECKING:
    from graphkiln.storage.node_cache import NodeCache

# A writer that loses this many compare-and-set races in a row is not racing, but broken.
REPLACE_TRIES = 100

# Each try but the first has found damage and set it aside; somebody else may have done the same meanwhile.
CREATE_TRIES = 3

_log = logging.getLogger("graphkiln")

# How many bytes of blobs are held at once where none of them is needed any longer.
BATCH_BYTES = 2**28

Found = TypeVar("Found")
Item = TypeVar("Item")

# What this host's copies are to a reader of the store. "bypass": nothing. "fill": it reads the store itself, and leaves
# copies of what was whole. "use": a copy does as well, so that it may not notice what the store has lost.
NodeCacheUse: TypeAlias = Literal["bypass", "fill", "use"]


class ObjectStore:
    """Blobs, and documents at given paths. Safe to share between threads."""

    def __init__(
        self,
        filesystem: StoreFilesystem,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        node_cache: "NodeCache | None" = None,
    ) -> None:
        self._fs = filesystem
        self._now = now
        self._node_cache = node_cache

    @property
    def url(self) -> str:
        """Where the store is, without a password."""
        return self._fs.url

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
        place = f"{layout.QUARANTINE}/{error.path}.{secrets.token_hex(8)}"
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
            DamagedStoreError: something else is in its place.
        """
        return _returned(self.read_all([path])[0])

    def read_all(self, paths: Sequence[str]) -> list[Stored]:
        """Return for each path the stored bytes, unchecked, or what `read_raw` would raise."""
        return [self._unless_fault(path, item) for path, item in zip(paths, self._fs.read_many(paths), strict=True)]

    def _unless_fault(
        self, path: str, found: Found | OSError | DamagedStoreError
    ) -> Found | FileNotFoundError | DamagedStoreError:
        """Return what was found in a place; raise the fault of the medium, if it is one."""
        if isinstance(found, DamagedStoreError):
            return self._damage(path, "an object", found)
        if isinstance(found, OSError) and not isinstance(found, FileNotFoundError):
            with self._medium(path):
                raise found
        return found

    def sync(self, paths: list[str]) -> None:
        """Return once the objects at `paths` would survive a loss of power.

        Raises:
            StoreUnavailableError: the medium fails, or one of them is gone.
        """
        with self._medium("a commit"):
            self._fs.sync(paths)

    def put_blob(self, content: bytes, *, known: Container[Digest] = ()) -> BlobRef:
        """Store one content as `put_blobs` does."""
        return self.put_blobs([content], known=known)[0]

    def put_blobs(self, contents: Sequence[bytes], *, known: Container[Digest] = ()) -> list[BlobRef]:
        """Store some contents and return their references. Damaged blobs in their places are set aside.

        Args:
            contents: the contents.
            known: blobs that were stored before; of each that is not there any more, a warning says so.

        Raises:
            StoreUnavailableError: the medium fails, or what is written is damaged again and again.
        """
        refs: list[BlobRef] = []
        for batch in in_batches(contents, len):
            encoded = [encode(content) for content in batch]
            paths = [layout.by_digest(layout.BLOBS, ref.digest) for ref, _ in encoded]
            written = self._create_or_mend({path: stored for path, (_, stored) in zip(paths, encoded, strict=True)})
            refs += [ref for ref, _ in encoded]
            for path in written:
                if path.rpartition("/")[2] in known:
                    _log.warning("%s/%s was missing: it has been written again", self.url, path)
        return refs

    def get_blob(self, ref: BlobRef, what: str, *, node_cache: NodeCacheUse = "bypass") -> bytes:
        """Return the content of one blob as `get_blobs` does."""
        return self.get_blobs([(ref, what)], node_cache=node_cache)[0]

    def get_blobs(self, wanted: Sequence[tuple[BlobRef, str]], *, node_cache: NodeCacheUse = "bypass") -> list[bytes]:
        """Return the contents of some blobs, once every digest of theirs matched.

        Args:
            wanted: the blobs, and what each is to the reader, for the message.
            node_cache: what this host's copies are to it; see `NodeCacheUse`.

        Raises:
            DamagedStoreError: the first of them that is missing or does not match.
        """
        return [_returned(content) for content in self._contents(wanted, node_cache)]

    def damage_of(
        self, wanted: Sequence[tuple[BlobRef, str]], *, node_cache: NodeCacheUse = "bypass"
    ) -> Iterator[DamagedStoreError]:
        """Read some blobs, a bounded number of bytes at once, and iterate over what `get_blobs` would raise."""
        for batch in in_batches(wanted, lambda item: item[0].stored_size):
            yield from (found for found in self._contents(batch, node_cache) if isinstance(found, DamagedStoreError))

    def _contents(
        self, wanted: Sequence[tuple[BlobRef, str]], node_cache: NodeCacheUse
    ) -> Iterator[bytes | DamagedStoreError]:
        stored = self._fetch(layout.BLOBS, [ref.digest for ref, _ in wanted], node_cache)
        for (ref, what), found in zip(wanted, stored, strict=True):
            try:
                if not isinstance(found, tuple):
                    raise found if isinstance(found, DamagedStoreError) else _missing()
                yield decode(ref, *found)
            except DamagedStoreError as error:
                path = layout.by_digest(layout.BLOBS, ref.digest)
                yield error if error.path else self._damage(path, what, error)

    def _fetch(self, folder: str, digests: Sequence[Digest], node_cache: NodeCacheUse) -> list[Hashed]:
        """Return the bytes that are stored under some digests, each with the digest that it has."""
        fetch = functools.partial(self._fetch_from_store, folder)
        if self._node_cache is None or node_cache == "bypass":
            return fetch(digests)
        if node_cache == "use":
            return self._node_cache.read(digests, fetch)
        found = fetch(digests)
        self._node_cache.keep(zip(digests, found, strict=True))
        return found

    def _fetch_from_store(self, folder: str, digests: Sequence[Digest]) -> list[Hashed]:
        paths = [layout.by_digest(folder, digest) for digest in digests]
        found = self._fs.read_many_with_digests(paths)
        return [
            item if isinstance(item, tuple) else self._unless_fault(path, item)
            for path, item in zip(paths, found, strict=True)
        ]

    def _read_document(self, path: str, kind: str, body_type: type[Body]) -> Body | None:
        return self._document(path, self.read_all([path])[0], kind, body_type)

    def _document(self, path: str, found: Stored, kind: str, body_type: type[Body]) -> Body | None:
        if isinstance(found, FileNotFoundError):
            return None
        with self._about(path, f"the {kind}"):
            return unseal(_returned(found), kind, body_type)

    def _create_or_mend(self, objects: Mapping[str, bytes]) -> list[str]:
        """Write objects that are named by their digests, unless they are there and whole.

        Returns:
            The paths where nothing at all was, damage included.
        """
        written: list[str] = []
        waiting = list(objects)
        for attempt in range(CREATE_TRIES):
            taken: list[str] = []
            created = self._fs.create_many([(path, objects[path]) for path in waiting])
            for path, done in zip(waiting, created, strict=True):
                if isinstance(done, OSError):
                    with self._medium(path):
                        raise done
                if not done:
                    taken.append(path)
                elif attempt == 0:
                    written.append(path)
            stored = zip(taken, self.read_all(taken), strict=True)
            differing = [path for path, found in stored if found != objects[path]]
            waiting = [path for path in differing if self.mend(functools.partial(self._read_as, path, objects)) is None]
            if not waiting:
                return written
        message = f"{self.url}/{waiting[0]} was damaged {CREATE_TRIES} times in a row: check the medium and run again"
        raise StoreUnavailableError(message, reason="contended", retryable=True)

    def _read_as(self, path: str, objects: Mapping[str, bytes]) -> bytes:
        with self._about(path, "named by its digest"):
            try:
                found = self.read_raw(path)
            except FileNotFoundError:
                raise _missing() from None
            if found != objects[path]:
                raise wrong_digest()
            return found

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

    def _damage(self, path: str, what: str, error: DamagedStoreError) -> DamagedStoreError:
        """Return the error that says where the damage is and what was wanted."""
        damage = "missing" if error.reason == "missing" else f"damaged: {error}"
        return DamagedStoreError(f"{self.url}/{path} ({what}) is {damage}", reason=error.reason, path=path)

    @contextlib.contextmanager
    def _about(self, path: str, what: str) -> Iterator[None]:
        """Say of every damage where it is and what was wanted."""
        try:
            yield
        except DamagedStoreError as error:
            if error.path:
                raise
            raise self._damage(path, what, error) from error
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


def in_batches(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Iterate over lists of items that together have at most `BATCH_BYTES`, unless one alone has more."""
    batch: list[Item] = []
    size = 0
    for item in items:
        size += size_of(item)
        if batch and size > BATCH_BYTES:
            yield batch
            batch, size = [], size_of(item)
        batch.append(item)
    if batch:
        yield batch


def _returned(found: Found | OSError | DamagedStoreError) -> Found:
    if isinstance(found, OSError | DamagedStoreError):
        raise found
    return found


def _missing() -> DamagedStoreError:
    return DamagedStoreError("it is missing", reason="missing")


def wrong_digest() -> DamagedStoreError:
    """Return the error of an object whose bytes are not those that its name says."""
    return DamagedStoreError("its bytes do not match its digest", reason="wrong-digest")
