"""The bytes of a store's objects, unchecked, and its faults in words that say what to do."""

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from graphkiln.storage.errors import BadInputError, DamagedStoreError, StoreUnavailableError, UntrustedError
from graphkiln.storage.filesystem import Entry, Stored, StoreFilesystem

Found = TypeVar("Found")


class RawObjects:
    """Objects at given paths. Safe to share between threads."""

    def __init__(self, filesystem: StoreFilesystem, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._fs = filesystem
        self._now = now

    @property
    def url(self) -> str:
        """Where the store is, without a password."""
        return self._fs.url

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
        return returned(self.read_all([path])[0])

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

    def create(self, path: str, data: bytes) -> bool:
        """Store an object unless there is one; tell whether it was stored."""
        with self._medium(path):
            return self._fs.create(path, data)

    def swap(self, path: str, data: bytes, *, expected: bytes) -> bool:
        """Store an object if it is still `expected`; tell whether it was stored."""
        with self._medium(path):
            return self._fs.replace(path, data, expected=expected)

    def remove(self, path: str, *, expected: bytes) -> bool:
        """Delete an object if it is still `expected`; tell whether it was deleted."""
        with self._medium(path):
            return self._fs.remove(path, expected=expected)

    def entries(self, folder: str) -> Iterator[Entry]:
        """Iterate over all objects below a folder, temporaries of killed writers included."""
        with self._medium(folder):
            yield from self._fs.entries(folder)

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete objects that nobody needs."""
        with self._medium(paths[0] if paths else ""):
            self._fs.delete_many(paths)

    def now(self) -> datetime:
        """Return the time, with a time zone."""
        return self._now()

    def sync(self, paths: list[str]) -> None:
        """Return once the objects at `paths` would survive a loss of power.

        Raises:
            StoreUnavailableError: the medium fails, or one of them is gone.
        """
        with self._medium("a commit"):
            self._fs.sync(paths)

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
        except UntrustedError as error:
            message = f"{self.url}/{path} ({what}) is not trusted: {error}"
            raise UntrustedError(message, reason=error.reason, path=path, stored=error.stored) from error
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


def returned(found: Found | OSError | DamagedStoreError) -> Found:
    """Return what was found, or raise it if it is an error."""
    if isinstance(found, OSError | DamagedStoreError):
        raise found
    return found
