"""Faults at one chosen operation of a run, the way that a medium or a kill brings them about."""

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import pytest

from graphkiln.storage import layout
from graphkiln.storage.errors import StoreUnavailableError
from graphkiln.storage.filesystem import Entry, StoreFilesystem

Answer = TypeVar("Answer")

ERRORS: Final = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "throttled": errno.EBUSY}
WRITES: Final = ("create", "replace", "remove", "move", "delete", "sync")
# "repeated" is what a client does that has not heard the answer to its first try.
FAULTS: Final = ("killed before", "killed after", *ERRORS, "reply lost", "repeated")
# Only where the medium shows an object before it is whole.
HALF_WRITTEN: Final = ("half written", "half written, then killed")
# Once, on the way: the object itself is whole.
HALF_READ: Final = "half read"


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

    def move(self, source: str, destination: str, *, expected: bytes | None) -> bool:
        if source not in self.objects or self.objects[source] != expected:
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

    def move(self, source: str, destination: str, *, expected: bytes | None) -> bool:
        self._take_room()
        return super().move(source, destination, expected=expected)

    def _take_room(self) -> None:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1


class KilledError(BaseException):
    """The process ends here: nothing that handles ordinary errors may see it."""


class FaultPoint:
    """Lets operations pass, and brings a fault about at one of them.

    Attributes:
        operations: what was done, as (operation, path), the failed one included; nothing is done after a kill.
        struck: the path of the operation that failed; empty before.
    """

    def __init__(
        self, at: int | tuple[str, str] | None = None, fault: str = "EIO", meanwhile: Callable[[], object] | None = None
    ) -> None:
        """Choose the operation.

        Args:
            at: its number, counted from 0; or its name and how its path begins: the first of these; None for no fault.
            fault: what befalls it.
            meanwhile: what somebody else does just before it, in which case nothing befalls it.
        """
        self.operations: list[tuple[str, str]] = []
        self.struck = ""
        self._at, self._fault, self._meanwhile = at, fault, meanwhile
        self._killed = False

    def do(
        self, operation: str, path: str, act: Callable[[], Answer], half: Callable[[], Answer] | None = None
    ) -> Answer:
        """Do something, or fail.

        Args:
            operation: its name.
            path: what it is about.
            act: does it.
            half: does, or answers, a half of it; None if there is no such thing.
        """
        if self._killed:  # whoever cleans up on the way out would have died as well
            raise KilledError
        due = self._is_due(operation, path)
        self.operations.append((operation, path))
        if not due:
            return act()
        self.struck = path
        if self._meanwhile is not None:
            self._meanwhile()
            return act()
        return self._fail(act, half)

    def _is_due(self, operation: str, path: str) -> bool:
        if isinstance(self._at, tuple):
            return not self.struck and operation == self._at[0] and path.startswith(self._at[1])
        return len(self.operations) == self._at

    def _fail(self, act: Callable[[], Answer], half: Callable[[], Answer] | None) -> Answer:
        self._killed = "killed" in self._fault
        if self._fault in ERRORS:
            raise OSError(ERRORS[self._fault], self._fault)
        if self._fault in (*HALF_WRITTEN, HALF_READ):
            if half is None:
                raise ValueError(f"{self.struck} cannot be done by half")
            answer = half()
            if self._fault == HALF_READ:
                return answer
        elif self._fault != "killed before":
            with contextlib.suppress(OSError):
                act()
        if self._fault == "repeated":
            return act()
        if self._killed:
            raise KilledError
        raise OSError(errno.EIO, self._fault)


class FaultyFilesystem(StoreFilesystem):
    """Passes everything on, and fails where `point` says; without one it only writes down what is done."""

    def __init__(self, inner: StoreFilesystem, point: FaultPoint | None = None) -> None:
        self.url = inner.url
        self.point = point or FaultPoint()
        self._inner, self._do = inner, self.point.do

    def read(self, path: str) -> bytes:
        return self._do("read", path, lambda: self._inner.read(path))

    def create(self, path: str, data: bytes) -> bool:
        return self._do("create", path, lambda: self._inner.create(path, data))

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        return self._do("replace", path, lambda: self._inner.replace(path, data, expected=expected))

    def remove(self, path: str, *, expected: bytes) -> bool:
        return self._do("remove", path, lambda: self._inner.remove(path, expected=expected))

    def move(self, source: str, destination: str, *, expected: bytes | None) -> bool:
        return self._do("move", source, lambda: self._inner.move(source, destination, expected=expected))

    def delete(self, path: str) -> None:
        self._do("delete", path, lambda: self._inner.delete(path))

    def entries(self, folder: str) -> Iterator[Entry]:
        return self._do("entries", folder, lambda: self._inner.entries(folder))

    def unwritable(self, folders: Sequence[str], divided: Sequence[str]) -> str | None:
        return self._inner.unwritable(folders, divided)

    def sync(self, paths: Iterable[str]) -> None:
        self._do("sync", "", lambda: self._inner.sync(paths))


def ends_of(fault: str, operation: str, path: str) -> contextlib.AbstractContextManager[object]:
    """Expect what a fault at an operation must bring about: an error, unless nothing depends on the operation."""
    if fault.startswith("killed"):
        return pytest.raises(KilledError)
    # A lease or a pin that cannot be taken away expires.
    if fault == "repeated" or (operation == "remove" and path.startswith((layout.LEASES, layout.PINS))):
        return contextlib.nullcontext()
    return pytest.raises(StoreUnavailableError)
