"""A store on a local or mounted disk.

Every object is written to a temporary in its own folder and then linked or renamed into place, so that no
reader ever sees a part of one, and a crash leaves at most a temporary that nothing reads. `os.link` fails if
the name is taken, which makes it an exclusive create; `flock` on the folder makes compare-and-set atomic, and
the system drops the lock of a process that dies.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from graphkiln.storage.digests import Digest, read_with_digest
from graphkiln.storage.errors import BadInputError, DamagedStoreError
from graphkiln.storage.filesystem import Entry, StoreFilesystem

TEMPORARY_PREFIX = ".tmp-"


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
        with open(self._opened(path), "rb") as file:  # noqa: PTH123  # a descriptor has no path
            return file.read()

    def read_with_digest(self, path: str) -> tuple[bytes, Digest]:
        """Return the whole object and its digest; see the contract."""
        return read_with_digest(self._opened(path))

    def _opened(self, path: str) -> int:
        final = self._root / path
        try:
            # A pipe in an object's place must not make a reader wait for a writer.
            descriptor = os.open(final, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO) or (error.errno == errno.ENOENT and final.is_symlink()):
                raise _no_file() from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _no_file()
        return descriptor

    def create(self, path: str, data: bytes) -> bool:
        """Link a new object into place; see the contract. Durable only after `sync`."""
        final = self._root / path
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

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        """Rename an object into place under a lock on its folder; see the contract."""
        final = self._root / path
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent) as folder:
            if not self._holds(path, expected):
                return False
            with _temporary(final, data, durable=True) as temporary:
                temporary.replace(final)
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

    def move(self, source: str, destination: str) -> bool:
        """Rename an object; see the contract."""
        final = self._root / destination
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            (self._root / source).rename(final)
        except FileNotFoundError:
            return False
        return True

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
def _temporary(final: Path, data: bytes, *, durable: bool) -> Iterator[Path]:
    final.parent.mkdir(parents=True, exist_ok=True)
    path = final.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        # The umask and the folder decide who may read: a second user of the store must be able to.
        with path.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


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


def _no_file() -> DamagedStoreError:
    return DamagedStoreError("it is not a file", reason="not-a-file")
