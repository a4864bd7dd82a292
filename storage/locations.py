"""How the URL of a store becomes a file system."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.local import LocalFilesystem

if TYPE_CHECKING:
    from graphkiln.storage.node_cache import NodeCache

# A scheme of at least two letters, so that it is no drive, and without the // that would make it a URL's.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(?!/{2}|:)")


def default_url() -> str:
    """Return the store that is used when none is named: ``$GRAPHKILN_STORE``, else the user's cache folder."""
    if url := os.environ.get("GRAPHKILN_STORE"):
        return url
    try:
        cache = user_cache_folder()
    except RuntimeError as error:
        message = f"there is no default store: {error}; name one with --store or GRAPHKILN_STORE"
        raise BadInputError(message, reason="no-store") from error
    return str(cache / "graphkiln")


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
    return _remote_kind(scheme)(url, options or {})


def _remote_kind(scheme: str) -> Callable[[str, Mapping[str, Any]], StoreFilesystem]:
    # fsspec costs more to import than a whole warm start from a local store.
    try:
        if scheme in ("s3", "s3a"):
            from graphkiln.storage.s3 import S3Filesystem

            return S3Filesystem
        if scheme in ("gs", "gcs"):
            from graphkiln.storage.gcs import GcsFilesystem

            return GcsFilesystem
        if scheme in ("az", "abfs", "abfss"):
            from graphkiln.storage.azure import AzureFilesystem

            return AzureFilesystem
    except ImportError:
        pass  # the generic one says which package is missing
    from graphkiln.storage.remote import RemoteFilesystem

    return RemoteFilesystem


def open_node_cache(filesystem: StoreFilesystem) -> "NodeCache | None":
    """Return this host's cache of a store, unless the store is as near as any copy, or the user wants none.

    Raises:
        BadInputError: the environment names a cache that cannot be.
    """
    if isinstance(filesystem, LocalFilesystem) or filesystem.url.startswith("memory:"):
        return None
    from graphkiln.storage.node_cache import default_node_cache  # a local store needs none of it

    return default_node_cache()


def user_cache_folder() -> Path:
    """Return where the caches of this user are.

    Raises:
        RuntimeError: the user has no home, and nothing else is set.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
