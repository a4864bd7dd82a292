"""A store on a local or mounted disk.

Every object is written to a temporary in its own folder and then linked or renamed into place, so that no
reader ever sees a part of one, and a crash leaves at most a temporary that nothing reads. `os.link` fails if
the name is taken, which makes it an exclusive create; `flock` on the folder makes compare-and-set atomic, and
the system drops the lock of a process that dies.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from graphkiln.storage.digests import HASH_WHILE_READING_FROM, Digest, digest_bytes, read_with_digest
from graphkiln.storage.errors import BadInputError, DamagedStoreError
from graphkiln.storage.filesystem import Entry, StoreFilesystem

TEMPORARY_PREFIX = ".tmp-"

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# The umask and the folder decide who may read: a second user of the store must be able to.
_MODE = 0o666

# Files below this size, in bytes, are read with one call.
_READ_AT_ONCE = 2**20

Read = TypeVar("Read")


class LocalFilesystem(StoreFilesystem):
    """A folder."""

    def __init__(self, root: str | Path) -> None:
        try:
            self._root = Path(root).expanduser().absolute()
        except RuntimeError as error:
            message = f"the store {root} cannot be found: {error}; give its full path"
            raise BadInputError(message, reason="store-url") from error
        self.url = str(self._root)

    def read(self, path: str) -> bytes:
        """Return the whole object; see the contract."""
        return self._read(path, _read_whole)

    def read_many_with_digests(self, paths: Sequence[str]) -> list[tuple[bytes, Digest] | OSError | DamagedStoreError]:
        """Hash large files while they are read; see the contract."""
        found: list[tuple[bytes, Digest] | OSError | DamagedStoreError] = []
        for path in paths:
            try:
                found.append(self._read(path, _read_with_digest))
            except (OSError, DamagedStoreError) as error:
                found.append(error)
        return found

    def read_with_digest(self, path: str) -> tuple[bytes, Digest]:
        """Return the whole object and the digest of these very bytes; raises what `read` does."""
        return self._read(path, _read_with_digest)

    def _read(self, path: str, read: Callable[[int, int], Read]) -> Read:
        """Return what `read` makes of the descriptor of an object and its size."""
        final = self._place(path)
        try:
            # A pipe in an object's place must not make a reader wait for a writer.
            descriptor = os.open(final, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO) or (error.errno == errno.ENOENT and Path(final).is_symlink()):
                raise _no_file() from error
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _no_file()
            return read(descriptor, status.st_size)
        finally:
            os.close(descriptor)

    def create(self, path: str, data: bytes) -> bool:
        """Link a new object into place; see the contract. Durable only after `sync`."""
        final = self._place(path)
        with _temporary(final, data, durable=False) as temporary:
            try:
                os.link(temporary, final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise BadInputError(
                        f"the file system of the store {self.url} has no hard links: use another place for the store",
                        reason="no-hard-links",
                    ) from error
                raise
        return True

    def _place(self, path: str) -> str:
        return f"{self.url}/{path}"

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        """Rename an object into place under a lock on its folder; see the contract."""
        final = self._root / path
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent) as folder:
            if not self._holds(path, expected):
                return False
            with _temporary(str(final), data, durable=True) as temporary:
                os.replace(temporary, final)  # noqa: PTH105  # the paths of many small objects are text
            os.fsync(folder)
        return True

    def remove(self, path: str, *, expected: bytes) -> bool:
        """Delete an object under a lock on its folder; see the contract."""
        final = self._root / path
        try:
            with _locked(final.parent):
                if not self._holds(path, expected):
                    return False
                final.unlink()
        except FileNotFoundError:
            return False
        return True

    def _holds(self, path: str, expected: bytes | None) -> bool:
        try:
            return self.read(path) == expected
        except FileNotFoundError:
            return expected is None
        except DamagedStoreError:
            return False  # whatever it is, nobody expects it

    def move(self, source: str, destination: str, *, expected: bytes | None) -> bool:
        """Rename an object under a lock on its folder; see the contract."""
        final = self._root / destination
        final.parent.mkdir(parents=True, exist_ok=True)
        place = self._root / source
        try:
            with _locked(place.parent):
                if not self._is_still(source, expected):
                    return False
                place.rename(final)
        except FileNotFoundError:
            return False
        return True

    def _is_still(self, path: str, expected: bytes | None) -> bool:
        try:
            return self.read(path) == expected
        except DamagedStoreError:
            return expected is None

    def delete(self, path: str) -> None:
        """Delete an object; see the contract."""
        try:
            (self._root / path).unlink(missing_ok=True)
        except IsADirectoryError as error:
            raise _no_file() from error

    def entries(self, folder: str) -> Iterator[Entry]:
        """Iterate over objects, temporaries of other writers included; see the contract."""
        for found in _files_below(self._root / folder):
            try:
                status = found.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # somebody has taken it away meanwhile
            yield Entry(Path(found.path).relative_to(self._root).as_posix(), status.st_size, status.st_mtime)

    def unwritable(self, folders: Sequence[str], divided: Sequence[str]) -> str | None:
        """Ask the system about each folder; see the contract."""
        root = f"{self._root}/"
        parts = itertools.chain.from_iterable(_folders_in(root + folder) for folder in divided)
        for path in itertools.chain((root + folder for folder in (*folders, *divided)), parts):
            if not os.access(path, os.W_OK | os.X_OK) and Path(path).is_dir():
                return path.removeprefix(root)
        return None

    def sync(self, paths: Iterable[str]) -> None:
        """Flush files and their folders to the disk; see the contract."""
        files = {self._root / path for path in paths}
        folders = {parent for file in files for parent in file.parents if parent.is_relative_to(self._root)}
        for path in (*files, *folders):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _temporary(final: str, data: bytes, *, durable: bool) -> Iterator[str]:
    folder = final.rpartition("/")[0]
    path = f"{folder}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, _NEW, _MODE)
    except FileNotFoundError:
        Path(folder).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, _NEW, _MODE)
    try:
        try:
            written = os.write(descriptor, data)
            while written < len(data):
                written += os.write(descriptor, memoryview(data)[written:])
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108  # here a path object would take as long as the call


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        # A child that was forked meanwhile holds the lock as well, unless it is dropped for both.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _folders_in(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as found:
            return [entry.path for entry in found if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files_below(folder: str | Path) -> Iterator["os.DirEntry[str]"]:
    # os.walk says nothing of a folder that it cannot read, and whoever asks would take it for empty.
    try:
        with os.scandir(folder) as found:
            entries = {entry.path + "/" * entry.is_dir(follow_symlinks=False): entry for entry in found}
    except (FileNotFoundError, NotADirectoryError):
        return
    for path, entry in sorted(entries.items()):
        if path.endswith("/"):
            yield from _files_below(path)
        else:
            yield entry


def _read_with_digest(descriptor: int, size: int) -> tuple[bytes, Digest]:
    if size >= HASH_WHILE_READING_FROM:
        return read_with_digest(descriptor, size)
    data = _read_whole(descriptor, size)
    return data, digest_bytes(data)


def _read_whole(descriptor: int, size: int) -> bytes:
    if size < _READ_AT_ONCE:
        # A file object would take as long as all the rest.
        data = os.read(descriptor, size + 1)
        if len(data) == size:
            return data
        os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:  # a descriptor has no path
        return file.read()


def _no_file() -> DamagedStoreError:
    return DamagedStoreError("it is not a file", reason="not-a-file")
