"""What a file system that is only read shares with others of its kind: it refuses every write."""

import errno
import os
from collections.abc import Iterable
from typing import NoReturn

from graphkiln.storage.filesystem import StoreFilesystem


class ReadOnlyFilesystem(StoreFilesystem):
    """The writing half of the contract."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    create = replace = remove = move = delete = _refuse

    def sync(self, paths: Iterable[str]) -> None:
        """Do nothing, as nothing was written; see the contract."""
