"""The small contract that a store asks of a file system, and how a URL becomes one.

Paths are relative to the store's root, with ``/`` between their parts. Everything above this contract works
the same on a local disk, in memory and on an object store.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.local import LocalFilesystem

# A scheme of at least two letters, so that it is no drive, and without the // that would make it a URL's.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(?!/{2}|:)")


class StoreFilesystem(Protocol):
    """What a store needs. Every method may raise `OSError` for faults of the medium."""

    url: str

    def read(self, path: str) -> bytes:
        """Return the whole object.

        Raises:
            FileNotFoundError: there is none.
            DamagedStoreError: something else is in its place, such as a folder, a pipe or a dangling link. To move
                it away makes room for an object.
        """

    def create(self, path: str, data: bytes) -> bool:
        """Write an object that does not exist yet, whole or not at all.

        Returns:
            False if there is one already, which stays as it is.
        """

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        """Durably write an object, whole or not at all, if it still holds `expected` (None: if there is none).

        Returns:
            False if it holds something else, which stays as it is. Of several writers of the same bytes more than
            one may be told that it wrote them.
        """

    def remove(self, path: str, *, expected: bytes) -> bool:
        """Delete an object if it still holds `expected`.

        Returns:
            False if it holds something else, or is gone.
        """

    def move(self, source: str, destination: str) -> bool:
        """Move an object, or whatever stands in the place of one, to a path that nobody else has ever used.

        The caller makes up such a path: to look whether it is free would cost more than it could ever save.

        Returns:
            False if there is no object at `source` (any more).
        """

    def delete(self, path: str) -> None:
        """Delete an object; it is no error if there is none.

        Raises:
            DamagedStoreError: something else is in its place, such as a folder.
        """

    def names(self, folder: str) -> Iterator[str]:
        """Iterate over the paths of all objects below `folder`, in order; there may be none."""

    def unwritable(self, folders: Sequence[str], divided: Sequence[str]) -> str | None:
        """Return a folder that is there and that this user cannot write to, if it can be told without writing.

        Args:
            folders: where to look.
            divided: where to look as well, and in the folders directly below.
        """

    def sync(self, paths: Iterable[str]) -> None:
        """Return once the objects at `paths` would survive a loss of power."""


def open_filesystem(url: str, options: Mapping[str, Any] | None = None) -> StoreFilesystem:
    """Return the file system for a store's URL, without touching it.

    Args:
        url: a local path, or any URL that fsspec knows (``s3://bucket/prefix``, ``memory://name``).
        options: what fsspec passes to the file system, such as an endpoint.

    Raises:
        BadInputError: fsspec does not know the protocol, its package is not installed, or an option is wrong.
        StoreUnavailableError: a server that has to be connected to at once does not answer.
    """
    scheme, separator, rest = url.partition("://")
    local = not separator or scheme in ("file", "local")
    if not separator and _SCHEME.match(url):
        scheme, _, rest = url.partition(":")
        form = f"{scheme}://{rest if scheme in ('file', 'local') else rest.lstrip('/')}"
        raise BadInputError(
            f"the store {url} is neither a path nor a URL: did you mean {form}, or the path ./{url}?",
            reason="store-url",
        )
    if local and options:
        raise BadInputError(
            f"the store {url} is local, and takes no options: {', '.join(options)}", reason="storage-option"
        )
    if local:
        return LocalFilesystem(rest if separator else url)
    # fsspec costs more to import than a whole warm start from a local store.
    if scheme in ("s3", "s3a"):
        from graphkiln.storage.s3 import S3Filesystem

        return S3Filesystem(url, options or {})
    from graphkiln.storage.remote import RemoteFilesystem

    return RemoteFilesystem(url, options or {})
