"""Objects on a file system: blobs and sealed documents, checked on every read, with damage set aside.

A read gives what was written, or None where nothing is, or raises `DamagedStoreError`. A caller that is about
to make missing things anyway passes through `ObjectStore.mend`, which moves the damaged object to quarantine,
warns, and answers None.
"""

import copy
import functools
import logging
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, TypeVar

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef, decode, encode
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import Body, seal, unseal
from graphkiln.storage.errors import DamagedStoreError, StoreUnavailableError, UntrustedError
from graphkiln.storage.filesystem import Hashed, Stored, StoreFilesystem
from graphkiln.storage.raw_objects import RawObjects, returned
from graphkiln.storage.records import QuarantineNote, Signed
from graphkiln.storage.signing import EVERYBODY, Trust

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


class ObjectStore(RawObjects):
    """Blobs, and documents at given paths. Safe to share between threads."""

    def __init__(
        self,
        filesystem: StoreFilesystem,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        trust: Trust = EVERYBODY,
        node_cache: "NodeCache | None" = None,
    ) -> None:
        super().__init__(filesystem, now)
        self.trust = trust
        self._node_cache = node_cache
        self._told: set[str] = set()

    def for_everybody(self) -> Self:
        """Return this store without its trust: for those who only ask what is there, whoever has signed it."""
        everybody = copy.copy(self)
        everybody.trust = EVERYBODY
        return everybody

    def mend(self, read: Callable[[], Found]) -> Found | None:
        """Return what `read` returns; if it finds damage twice, quarantine that, warn, and return None.

        What was damaged on its way here, and what somebody else has mended meanwhile, is whole the second time. What
        is not trusted stays, as others may trust it, until something trusted is written in its place; it is warned of
        once.
        """
        try:
            return read()
        except DamagedStoreError as error:
            first, stored = error, self._stored(error.path)
        except UntrustedError as error:
            self._tell_once(error)
            return None
        try:
            found = read()
        except DamagedStoreError as error:
            _log.warning("%s: it will be made again", error)
            if error.path and error.path == first.path:
                self._set_aside(error, stored)
            return None
        except UntrustedError as error:
            self._tell_once(error)
            return None
        _log.warning("%s; read again, it is whole", first)
        return found

    def _tell_once(self, error: UntrustedError) -> None:
        if str(error) not in self._told:
            self._told.add(str(error))
            _log.warning("%s", error)

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

    def peek(self, path: str) -> bytes | None:
        """Return the stored bytes of an object, unchecked, or None. What is no file is set aside."""
        try:
            return self.mend(lambda: self.read_raw(path))
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes) -> None:
        """Store an object in place of whatever is there."""
        self._replace(path, data)

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
            self.put_encoded(encoded, known=known)
            refs += [ref for ref, _ in encoded]
        return refs

    def put_encoded(self, encoded: Sequence[tuple[BlobRef, bytes]], *, known: Container[Digest] = ()) -> None:
        """Store what `encode` returned of some contents, as `put_blobs` does."""
        written = self._create_or_mend({layout.by_digest(layout.BLOBS, ref.digest): data for ref, data in encoded})
        for path in written:
            if path.rpartition("/")[2] in known:
                _log.warning("%s/%s was missing: it has been written again", self.url, path)

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
        return [returned(content) for content in self._contents(wanted, node_cache)]

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

    def get_stored(self, ref: BlobRef, what: str) -> bytes:
        """Return the stored bytes of a blob, once every digest matched, that of the content included.

        Args:
            ref: the blob.
            what: what it is to the reader, for the message.

        Raises:
            DamagedStoreError: it is missing or does not match.
        """
        path = layout.by_digest(layout.BLOBS, ref.digest)
        with self._about(path, what):
            try:
                stored = self.read_raw(path)
            except FileNotFoundError:
                raise _missing() from None
            decode(ref, stored)
            return stored

    def put_catalog_part(self, path: str, data: bytes) -> None:
        """Store a part of the catalogue under a path of `layout.catalog_part`. Damage in its place is set aside."""
        self._create_or_mend({path: data})

    def get_catalog_part(self, path: str) -> bytes:
        """Return a part of the catalogue, once its bytes have matched the digest in its path.

        Raises:
            DamagedStoreError: it is missing or does not match.
        """
        with self._about(path, "a part of the catalogue"):
            try:
                data = self.read_raw(path)
            except FileNotFoundError:
                raise _missing() from None
            if digest_bytes(data) != layout.digest_of_catalog_part(path):
                raise DamagedStoreError("its bytes do not match the digest in its name", reason="wrong-digest")
            return data

    def drop_catalog_part(self, path: str) -> None:
        """Delete a part of the catalogue whose rows are in another one."""
        self._drop(path, "part of the catalogue")

    def put_stored(self, ref: BlobRef, stored: bytes) -> bool:
        """Store a blob in the form in which another store has it, and read it back.

        Args:
            ref: the blob.
            stored: its stored bytes, which the caller has checked.

        Returns:
            Whether it was not there.

        Raises:
            DamagedStoreError: other bytes come back.
            StoreUnavailableError: the medium fails.
        """
        written = self._create_or_mend({layout.by_digest(layout.BLOBS, ref.digest): stored})
        self.get_stored(ref, "a blob that was just written")
        return bool(written)

    def put_document(self, path: str, data: bytes, keep: Callable[[], object]) -> bool:
        """Durably store the bytes of a document unless what is there is to be kept. Damage in its place is set aside.

        Args:
            path: where it belongs.
            data: its bytes, which the caller has checked.
            keep: reads what is there, and tells whether it stays.

        Returns:
            Whether it was stored, and was not there before.

        Raises:
            StoreUnavailableError: the medium fails, or others change the document all the time.
        """
        return self.peek(path) != data and self._replace(path, data, stays=lambda _: bool(self.mend(keep)))

    def _read_document(self, path: str, kind: str, body_type: type[Body]) -> Body | None:
        return self._document(path, self.read_all([path])[0], kind, body_type)

    def _opened(self, data: bytes, kind: str, body_type: type[Body]) -> Body:
        body = unseal(data, kind, body_type)
        if isinstance(body, Signed):
            self.trust.check(kind, data, body)
        return body

    def _document(self, path: str, found: Stored, kind: str, body_type: type[Body]) -> Body | None:
        if isinstance(found, FileNotFoundError):
            return None
        with self._about(path, f"the {kind}"):
            return self._opened(returned(found), kind, body_type)

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

    def _replace(self, path: str, data: bytes, *, stays: Callable[[bytes], bool] = lambda _: False) -> bool:
        """Write an object in place of the one that is there, unless that one `stays`; tell whether it was written."""
        for _ in range(REPLACE_TRIES):
            try:
                current = self.mend(lambda: self.read_raw(path))
            except FileNotFoundError:
                current = None
            if current is not None and current != data and stays(current):
                return False
            with self._medium(path):
                if current == data or self._fs.replace(path, data, expected=current):
                    return True
        raise self._contended(path)

    def _misplaced(self, path: str, belongs_to: str) -> DamagedStoreError:
        message = f"{self.url}/{path} is damaged: it belongs to {belongs_to}"
        return DamagedStoreError(message, reason="misplaced", path=path)

    def _contended(self, path: str) -> StoreUnavailableError:
        message = f"{self.url}/{path} was changed by others {REPLACE_TRIES} times in a row: run again"
        return StoreUnavailableError(message, reason="contended", retryable=True)


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


def _missing() -> DamagedStoreError:
    return DamagedStoreError("it is missing", reason="missing")


def wrong_digest() -> DamagedStoreError:
    """Return the error of an object whose bytes are not those that its name says."""
    return DamagedStoreError("its bytes do not match its digest", reason="wrong-digest")
