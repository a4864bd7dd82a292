"""A store on any file system that fsspec knows, such as ``memory://`` or ``sftp://``.

Object stores show an object only once it is whole, so there are no temporaries here. How exclusive `create`
is depends on the file system behind fsspec; `replace` compares and then writes, which is not atomic. Two
writers of one key therefore agree only as far as the object store's own conditional writes go. S3, Google Cloud
Storage and Azure have modules of their own, which are exclusive and atomic.
"""

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

import fsspec

from graphkiln.storage.credentials import Credentials
from graphkiln.storage.errors import BadInputError, DamagedStoreError, StoreUnavailableError
from graphkiln.storage.filesystem import Entry, StoreFilesystem

# What the file systems behind fsspec call the time of the last change.
_MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")

# How many requests one call that is about many objects has under way at once.
PARALLEL_REQUESTS = 32

_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")


class RemoteFilesystem(StoreFilesystem):
    """A folder of any file system that fsspec knows.

    Attributes:
        url: the URL without a password, for messages.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._credentials = Credentials(url, options)
        self.url = self._credentials.url
        try:
            # Other processes write here, so a cached listing would hide their objects.
            self._fs, root = fsspec.url_to_fs(url, **{"use_listings_cache": False, **options})
        except (ImportError, ValueError, TypeError) as error:
            message = f"the store {self.url} cannot be opened: {self._credentials.hide(str(error))}"
            raise BadInputError(message, reason="store-url") from None
        except Exception as error:  # noqa: BLE001 (some connect at once, and fail in their library's own words)
            words = f"{type(error).__name__}: {self._credentials.hide(str(error))}"
            message = f"the store {self.url} cannot be reached: {words}; check the network and run again"
            raise StoreUnavailableError(message, reason="store-io", retryable=True) from None
        self._root = root.rstrip("/")

    def read(self, path: str) -> bytes:
        """Return the whole object; see the contract."""
        with self._faults():
            data: bytes = self._fs.cat_file(self._path(path))
        return data

    def create(self, path: str, data: bytes) -> bool:
        """Write with fsspec's mode ``create``; see the contract."""
        with self._faults():
            self._make_folder(path)
            try:
                self._fs.pipe_file(self._path(path), data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # How s3fs tells of a lost race if the server does not name the condition that failed.
                if error.errno == errno.EINVAL and self._fs.exists(self._path(path)):
                    return False
                raise
        return True

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        """Compare, then write; see the contract and the note above."""
        try:
            current = self.read(path)
        except FileNotFoundError:
            current = None
        if current != expected:
            return False
        with self._faults():
            self._make_folder(path)
            self._fs.pipe_file(self._path(path), data)
        return True

    def remove(self, path: str, *, expected: bytes) -> bool:
        """Compare, then delete; see the contract and the note above."""
        try:
            if self.read(path) != expected:
                return False
        except FileNotFoundError:
            return False
        self.delete(path)
        return True

    def move(self, source: str, destination: str) -> bool:
        """Copy an object, then delete it; see the contract."""
        try:
            data = self.read(source)
        except FileNotFoundError:
            return False
        if not self.create(destination, data) and self.read(destination) != data:
            raise FileExistsError(errno.EEXIST, "there is another object", destination)
        self.delete(source)
        return True

    def delete(self, path: str) -> None:
        """Delete an object; see the contract."""
        with self._faults(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def entries(self, folder: str) -> Iterator[Entry]:
        """Iterate over objects; see the contract."""
        prefix = f"{self._root}/"
        with self._faults():
            found = self._fs.find(self._path(folder), detail=True)
        for name, facts in sorted(found.items()):
            if name.startswith(prefix):  # some servers list the folder itself
                yield Entry(name.removeprefix(prefix), facts["size"], _modified(facts))

    def read_many(self, paths: Sequence[str]) -> list[bytes | OSError | DamagedStoreError]:
        """Read side by side where fsspec does; see the contract."""
        return self._in_threads(super().read_many, paths)

    def create_many(self, objects: Sequence[tuple[str, bytes]]) -> list[bool | OSError]:
        """Write side by side where fsspec does; see the contract."""
        return self._in_threads(super().create_many, objects)

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete side by side where fsspec does; see the contract."""
        self._in_threads(self._delete_each, paths)

    def sync(self, paths: Iterable[str]) -> None:
        """Do nothing: an object store answers a write once it is durable."""

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _make_folder(self, path: str) -> None:
        self._fs.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)

    def _delete_each(self, paths: Sequence[str]) -> list[None]:
        for path in paths:
            self.delete(path)
        return []

    def _in_threads(self, do: Callable[[Sequence[_Item]], Sequence[_Answer]], items: Sequence[_Item]) -> list[_Answer]:
        # Those that run on fsspec's event loop may be asked from many threads; the others promise nothing.
        threads = min(PARALLEL_REQUESTS, len(items)) if self._fs.async_impl else 1
        if threads <= 1:
            return list(do(items))
        with ThreadPoolExecutor(threads, thread_name_prefix="graphkiln-store") as pool:
            return [answer for answers in pool.map(lambda item: do([item]), items) for answer in answers]

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Make every fault an `OSError`: each library behind fsspec has its own family of errors."""
        try:
            yield
        except Exception as error:
            told = self._credentials.told_by(error)
            if isinstance(error, OSError):
                if not told:
                    raise
                raise type(error)(error.errno or errno.EIO, self._credentials.hide(str(error))) from None
            words = f"{type(error).__name__}: {self._credentials.hide(str(error))}"
            raise OSError(errno.EIO, words) from (None if told else error)


def _modified(facts: Mapping[str, Any]) -> float:
    """Return when an object was written. Each file system behind fsspec has a name of its own for it."""
    found = next((facts[name] for name in _MODIFIED if facts.get(name)), None)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    if isinstance(found, datetime):
        return found.timestamp()
    if isinstance(found, int | float):
        return float(found)
    raise OSError(errno.ENOTSUP, "the file system does not tell when an object was written", facts.get("name"))
