"""What a file system that is only read shares with others of its kind: it refuses every write."""

import errno
import os
from collections.abc import Iterable, Sequence
from typing import NoReturn


class ReadOnlyFilesystem:
    """The writing half of `graphkiln.storage.filesystem.StoreFilesystem`."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    create = replace = remove = move = delete = _refuse

    def unwritable(self, folders: Sequence[str], divided: Sequence[str]) -> str | None:
        """Return None, as every write is refused anyway; see the contract."""

    def sync(self, paths: Iterable[str]) -> None:
        """Do nothing, as nothing was written; see the contract."""
