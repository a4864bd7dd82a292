"""The small contract that a store asks of a file system.

Paths are relative to the store's root, with ``/`` between their parts. Everything above this contract works
the same on a local disk, in memory and on an object store.
"""

import abc
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.errors import DamagedStoreError

# What is stored in a place: bytes, nothing, or something that is no object. And the same with the digest of the bytes.
Stored: TypeAlias = bytes | FileNotFoundError | DamagedStoreError
Hashed: TypeAlias = tuple[bytes, Digest] | FileNotFoundError | DamagedStoreError


class Entry(NamedTuple):
    """One object of a listing.

    Attributes:
        path: the object.
        size: number of its bytes.
        modified: when it was written, in seconds since the epoch, on the clock of the medium.
    """

    path: str
    size: int
    modified: float


class StoreFilesystem(abc.ABC):
    """What a store needs. Every method may raise `OSError` for faults of the medium.

    Those that take many objects do what they would do one by one; a file system that can do better says how.
    """

    url: str

    @abc.abstractmethod
    def read(self, path: str) -> bytes:
        """Return the whole object.

        Raises:
            FileNotFoundError: there is none.
            DamagedStoreError: something else is in its place, such as a folder, a pipe or a dangling link. To move
                it away makes room for an object.
        """

    @abc.abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Write an object that does not exist yet, whole or not at all.

        Returns:
            False if there is one already, which stays as it is. It may be the caller's own, if the answer to a write
            over a network was lost and the write repeated: a caller to whom that matters writes what nobody else
            does, and looks.
        """

    @abc.abstractmethod
    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        """Durably write an object, whole or not at all, if it still holds `expected` (None: if there is none).

        Returns:
            False if it holds something else, which stays as it is. Of several writers of the same bytes more than
            one may be told that it wrote them.
        """

    @abc.abstractmethod
    def remove(self, path: str, *, expected: bytes) -> bool:
        """Delete an object if it still holds `expected`.

        Returns:
            False if it holds something else, or is gone.
        """

    @abc.abstractmethod
    def move(self, source: str, destination: str, *, expected: bytes | None) -> bool:
        """Move an object, if it still holds `expected`, to a path that nobody else has ever used.

        The caller makes up such a path: to look whether it is free would cost more than it could ever save.

        Args:
            source: where it is.
            destination: where to.
            expected: what it has to hold; None for what is no object, such as a folder, that stands in its place.

        Returns:
            False if there is something else at `source` (by now), or nothing.
        """

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object; it is no error if there is none.

        Raises:
            DamagedStoreError: something else is in its place, such as a folder.
        """

    @abc.abstractmethod
    def entries(self, folder: str) -> Iterator[Entry]:
        """Iterate over all objects below `folder`, in the order of their paths; there may be none."""

    def names(self, folder: str) -> Iterator[str]:
        """Iterate over the paths of all objects below `folder`, in order; there may be none."""
        return (entry.path for entry in self.entries(folder))

    def read_many(self, paths: Sequence[str]) -> list[bytes | OSError | DamagedStoreError]:
        """Return for each path the whole object, or what `read` would raise.

        After a fault of the medium the others need not be tried; they get the same fault.
        """
        done: list[bytes | OSError | DamagedStoreError] = []
        for path in paths:
            try:
                done.append(self.read(path))
            except (FileNotFoundError, DamagedStoreError) as error:
                done.append(error)
            except OSError as error:
                return done + [error] * (len(paths) - len(done))
        return done

    def read_many_with_digests(self, paths: Sequence[str]) -> list[tuple[bytes, Digest] | OSError | DamagedStoreError]:
        """Return what `read_many` does, and of each object the digest of these very bytes."""
        return [(item, digest_bytes(item)) if isinstance(item, bytes) else item for item in self.read_many(paths)]

    def create_many(self, objects: Sequence[tuple[str, bytes]]) -> list[bool | OSError]:
        """Write objects of different paths, and return for each what `create` would return or raise.

        After a fault of the medium the others need not be tried; they get the same fault.
        """
        done: list[bool | OSError] = []
        for path, data in objects:
            try:
                done.append(self.create(path, data))
            except OSError as error:
                return done + [error] * (len(objects) - len(done))
        return done

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete objects; it is no error if one is not there, or if something else is in its place."""
        for path in paths:
            with contextlib.suppress(DamagedStoreError):
                self.delete(path)

    def unwritable(self, folders: Sequence[str], divided: Sequence[str]) -> str | None:  # noqa: ARG002
        """Return a folder that is there and that this user cannot write to, if it can be told without writing.

        Args:
            folders: where to look.
            divided: where to look as well, and in the folders directly below.
        """
        return None

    @abc.abstractmethod
    def sync(self, paths: Iterable[str]) -> None:
        """Return once the objects at `paths` would survive a loss of power."""
