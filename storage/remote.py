"""A store on any file system that fsspec knows, such as ``memory://`` or ``s3://``.

Object stores show an object only once it is whole, so there are no temporaries here. How exclusive `create`
is depends on the file system behind fsspec; `replace` compares and then writes, which is not atomic. Two
writers of one key therefore agree only as far as the object store's own conditional writes go.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import fsspec

from graphkiln.storage.errors import BadInputError


class RemoteFilesystem:
    """Implements `graphkiln.storage.filesystem.StoreFilesystem`."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url
        try:
            # Other processes write here, so a cached listing would hide their objects.
            self._fs, root = fsspec.url_to_fs(url, **{"use_listings_cache": False, **options})
        except (ImportError, ValueError, TypeError) as error:
            raise BadInputError(f"the store {url} cannot be opened: {error}", reason="store-url") from error
        self._root = root.rstrip("/")

    def read(self, path: str) -> bytes:
        """Return the whole object; see the contract."""
        data: bytes = self._fs.cat_file(self._path(path))
        return data

    def create(self, path: str, data: bytes) -> bool:
        """Write with fsspec's mode ``create``; see the contract."""
        self._make_folder(path)
        try:
            self._fs.pipe_file(self._path(path), data, mode="create")
        except FileExistsError:
            return False
        return True

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        """Compare, then write; see the contract and the note above."""
        try:
            current = self.read(path)
        except FileNotFoundError:
            current = None
        if current != expected:
            return False
        self._make_folder(path)
        self._fs.pipe_file(self._path(path), data)
        return True

    def move(self, source: str, destination: str) -> bool:
        """Copy an object, then delete it; see the contract."""
        try:
            data = self.read(source)
        except FileNotFoundError:
            return False
        self.create(destination, data)
        self.delete(source)
        return True

    def delete(self, path: str) -> None:
        """Delete an object; see the contract."""
        try:
            self._fs.rm_file(self._path(path))
        except FileNotFoundError:
            return

    def names(self, folder: str) -> Iterator[str]:
        """Iterate over objects; see the contract."""
        prefix = f"{self._root}/"
        for name in sorted(self._fs.find(self._path(folder))):
            yield name.removeprefix(prefix)

    def sync(self, paths: Iterable[str]) -> None:
        """Do nothing: an object store answers a write once it is durable."""

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _make_folder(self, path: str) -> None:
        self._fs.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)
