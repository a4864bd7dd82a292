"""Faults below the product's own file system for disks, at each system call that changes one."""

import functools
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import pytest

from tests.storage.faults import HALF_WRITTEN, FaultPoint

# What may befall each of them.
FAULTS_OF_CALLS: Final = {
    "mkdir": ("killed before", "ENOSPC"),
    "open": ("killed before", "ENOSPC"),
    "write": HALF_WRITTEN,
    "fsync": ("killed before", "EIO"),
    "link": ("killed before", "killed after", "ENOSPC", "reply lost"),
    "replace": ("killed before", "killed after", "EIO", "reply lost"),
    "rename": ("killed before", "killed after", "EIO", "reply lost"),
    "unlink": ("killed before", "EIO"),
}
_OF_PATHS = ("mkdir", "link", "replace", "rename", "unlink")


@contextmanager
def faulty_disk(root: Path, point: FaultPoint) -> Iterator[None]:
    """Count the system calls that change what is below a folder, and fail at the one that `point` says."""

    def counted(name: str, real: Callable[..., Any], path: Any, *arguments: Any, **options: Any) -> Any:
        if not _is_below(path, root):
            return real(path, *arguments, **options)
        return point.do(name, str(path), lambda: real(path, *arguments, **options))

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode != "xb" or not _is_below(path, root):
            return real_open(path, mode, *arguments, **options)
        return _CountedFile(point.do("open", str(path), lambda: real_open(path, mode, *arguments, **options)), point)

    real_open, real_fsync = io.open, os.fsync
    with pytest.MonkeyPatch.context() as patch:
        for name in _OF_PATHS:
            patch.setattr(os, name, functools.partial(counted, name, getattr(os, name)))
        patch.setattr(os, "fsync", lambda descriptor: point.do("fsync", "", lambda: real_fsync(descriptor)))
        patch.setattr(io, "open", opened)
        yield


class _CountedFile:
    def __init__(self, file: IO[bytes], point: FaultPoint) -> None:
        self._file, self._point = file, point

    def __enter__(self) -> "_CountedFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        return self._point.do(
            "write", self._file.name, lambda: self._file.write(data), lambda: self._file.write(data[: len(data) // 2])
        )


def _is_below(path: Any, root: Path) -> bool:
    return isinstance(path, str | os.PathLike) and str(path).startswith(str(root))
