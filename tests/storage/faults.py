"""A file system that fails at one chosen operation, the way that a medium or a kill does."""

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from graphkiln.storage.filesystem import Entry, StoreFilesystem

Answer = TypeVar("Answer")

ERRORS: Final = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
WRITES: Final = ("create", "replace", "remove", "move", "delete", "sync")
FAULTS: Final = ("killed before", "killed after", *ERRORS, "reply lost")


class DictFilesystem(StoreFilesystem):
    """The least that a store can be on, and the fastest: for tests that make hundreds of stores.

    Attributes:
        objects: what is stored.
        modified: when it was written; what was there from the beginning is as old as can be.
    """

    def __init__(self, objects: Mapping[str, bytes], clock: Callable[[], float] = lambda: 0.0) -> None:
        self.url = "dict"
        self.objects = dict(objects)
        self.modified: dict[str, float] = {}
        self._clock = clock

    def read(self, path: str) -> bytes:
        try:
            return self.objects[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such object", path) from None

    def create(self, path: str, data: bytes) -> bool:
        return self.replace(path, data, expected=None)

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        if self.objects.get(path) != expected:
            return False
        self.objects[path] = data
        self.modified[path] = self._clock()
        return True

    def remove(self, path: str, *, expected: bytes) -> bool:
        if self.objects.get(path) != expected:
            return False
        del self.objects[path]
        return True

    def move(self, source: str, destination: str) -> bool:
        if source not in self.objects:
            return False
        self.objects[destination] = self.objects.pop(source)
        self.modified[destination] = self.modified.pop(source, 0.0)  # as a rename on a disk
        return True

    def delete(self, path: str) -> None:
        self.objects.pop(path, None)

    def entries(self, folder: str) -> Iterator[Entry]:
        for path, data in sorted(self.objects.items()):
            if not folder or path.startswith(f"{folder}/"):
                yield Entry(path, len(data), self.modified.get(path, 0.0))

    def sync(self, paths: Iterable[str]) -> None:
        pass


class FullFilesystem(DictFilesystem):
    """Takes so many writes, and has no space left for more."""

    def __init__(self, objects: Mapping[str, bytes], room: int) -> None:
        super().__init__(objects)
        self.room = room

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        self._take_room()
        return super().replace(path, data, expected=expected)

    def move(self, source: str, destination: str) -> bool:
        self._take_room()
        return super().move(source, destination)

    def _take_room(self) -> None:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1


class KilledError(BaseException):
    """The process ends here: nothing that handles ordinary errors may see it."""


class FaultyFilesystem(StoreFilesystem):
    """Passes everything on, and fails at the operation number `at`, counted from 0.

    Attributes:
        operations: what was done, as (operation, path), the failed one included.
    """

    def __init__(self, inner: StoreFilesystem, at: int | None = None, fault: str = "EIO") -> None:
        self.url = inner.url
        self.operations: list[tuple[str, str]] = []
        self._inner, self._at, self._fault = inner, at, fault

    def read(self, path: str) -> bytes:
        return self._do("read", path, lambda: self._inner.read(path))

    def create(self, path: str, data: bytes) -> bool:
        return self._do("create", path, lambda: self._inner.create(path, data))

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        return self._do("replace", path, lambda: self._inner.replace(path, data, expected=expected))

    def remove(self, path: str, *, expected: bytes) -> bool:
        return self._do("remove", path, lambda: self._inner.remove(path, expected=expected))

    def move(self, source: str, destination: str) -> bool:
        return self._do("move", source, lambda: self._inner.move(source, destination))

    def delete(self, path: str) -> None:
        self._do("delete", path, lambda: self._inner.delete(path))

    def entries(self, folder: str) -> Iterator[Entry]:
        return self._do("entries", folder, lambda: self._inner.entries(folder))

    def unwritable(self, folders: Sequence[str], divided: Sequence[str]) -> str | None:
        return self._inner.unwritable(folders, divided)

    def sync(self, paths: Iterable[str]) -> None:
        self._do("sync", "", lambda: self._inner.sync(paths))

    def _do(self, operation: str, path: str, act: Callable[[], Answer]) -> Answer:
        due = len(self.operations) == self._at
        self.operations.append((operation, path))
        if not due:
            return act()
        if self._fault == "killed before":
            raise KilledError
        if self._fault in ERRORS:
            raise OSError(ERRORS[self._fault], self._fault)
        with contextlib.suppress(OSError):
            act()
        if self._fault == "killed after":
            raise KilledError
        raise OSError(errno.EIO, "the reply was lost")
