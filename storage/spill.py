"""A store whose disk may become full while it is used: from then on, what is written is kept in memory.

A trainer that has just compiled for an hour is not to fail because the result cannot be kept. Once a write has found
no space, nothing more is written, even if space comes back: so nothing in the store ever names what only this process
has, and no commit point is moved there.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.filesystem import Entry, StoreFilesystem

_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger("graphkiln")


class SpillingFilesystem(StoreFilesystem):
    """Another file system and, once that is full, memory."""

    def __init__(self, inner: StoreFilesystem) -> None:
        self.url = inner.url
        self._inner = inner
        self._full = False
        self._kept: dict[str, bytes | None] = {}  # None: it is there no more
        self._lock = threading.RLock()

    def read(self, path: str) -> bytes:
        """Return the whole object; see the contract."""
        with self._lock:
            if path not in self._kept:
                return self._inner.read(path)
            data = self._kept[path]
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "it is there no more", path)
        return data

    def create(self, path: str, data: bytes) -> bool:
        """Write an object that does not exist yet; see the contract."""
        written = self._written(lambda: self._inner.create(path, data))
        return self._keep(path, data, expected=None) if written is None else written

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        """Write an object if it still holds `expected`; see the contract."""
        written = self._written(lambda: self._inner.replace(path, data, expected=expected))
        return self._keep(path, data, expected=expected) if written is None else written

    def remove(self, path: str, *, expected: bytes) -> bool:
        """Delete an object if it still holds `expected`; see the contract."""
        with self._lock:
            if path not in self._kept:
                return self._inner.remove(path, expected=expected)
            return self._keep(path, None, expected=expected)

    def move(self, source: str, destination: str, *, expected: bytes | None) -> bool:
        """Move an object; see the contract."""
        with self._lock:
            if source not in self._kept:
                written = self._written(lambda: self._inner.move(source, destination, expected=expected))
                if written is not None:
                    return written
            data: bytes | None
            try:
                data = self.read(source)
            except FileNotFoundError:
                return False
            except DamagedStoreError:
                data = None  # no object, whose place is needed all the same
            if data != expected:
                return False
            if data is not None:
                self._kept[destination] = data
            self._kept[source] = None
        return True

    def delete(self, path: str) -> None:
        """Delete an object; see the contract."""
        with self._lock:
            if path in self._kept:
                self._kept[path] = None
                return
        self._inner.delete(path)

    def entries(self, folder: str) -> Iterator[Entry]:
        """Iterate over all objects; those in memory are new. See the contract."""
        found = {entry.path: entry for entry in self._inner.entries(folder)}
        with self._lock:
            for path, data in self._kept.items():
                found.pop(path, None)
                if data is not None and (not folder or path.startswith(f"{folder}/")):
                    found[path] = Entry(path, len(data), time.time())
        yield from sorted(found.values())

    def read_many(self, paths: Sequence[str]) -> list[bytes | OSError | DamagedStoreError]:
        """Read as the file system below does, while nothing is in memory; see the contract."""
        return super().read_many(paths) if self._kept else self._inner.read_many(paths)

    def read_many_with_digests(self, paths: Sequence[str]) -> list[tuple[bytes, Digest] | OSError | DamagedStoreError]:
        """Read as the file system below does, while nothing is in memory; see the contract."""
        return super().read_many_with_digests(paths) if self._kept else self._inner.read_many_with_digests(paths)

    def create_many(self, objects: Sequence[tuple[str, bytes]]) -> list[bool | OSError]:
        """Write as the file system below does, while it has space; see the contract."""
        if self._full:
            return super().create_many(objects)
        done = self._inner.create_many(objects)
        # Each that found no space is written again, alone, and ends in memory.
        return [
            self.create(*item) if isinstance(answer, OSError) and answer.errno in _FULL else answer
            for item, answer in zip(objects, done, strict=True)
        ]

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete as the file system below does, while nothing is in memory; see the contract."""
        if self._kept:
            super().delete_many(paths)
        else:
            self._inner.delete_many(paths)

    def unwritable(self, folders: Sequence[str], divided: Sequence[str]) -> str | None:
        """Return a folder that this user cannot write to; see the contract."""
        return self._inner.unwritable(folders, divided)

    def sync(self, paths: Iterable[str]) -> None:
        """Flush what is in the store; see the contract."""
        with self._lock:
            stored = [path for path in paths if path not in self._kept]
        self._written(lambda: self._inner.sync(stored))

    def _written(self, write: Callable[[], bool | None]) -> bool | None:
        """Return what a write answers; None if there is no space for it, or was none for an earlier one."""
        if self._full:
            return None
        try:
            return write()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            with self._lock:
                if not self._full:
                    self._full = True
                    _log.warning(
                        "no space left for the store %s: this run goes on with what it compiles, and commits nothing; "
                        "free some space for the next one",
                        self.url,
                    )
            return None

    def _keep(self, path: str, data: bytes | None, *, expected: bytes | None) -> bool:
        with self._lock:
            try:
                current = self.read(path)
            except FileNotFoundError:
                current = None
            except DamagedStoreError:
                return False  # whatever it is, nobody expects it
            if current != expected:
                return False
            self._kept[path] = data
        return True
