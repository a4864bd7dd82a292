"""Locks between the processes and threads of one host, which the system drops when their owner dies."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PAUSE_SECONDS = 0.002


class FileLock:
    """A file that exists while somebody holds its lock."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def try_to_take(cls, path: Path) -> "FileLock | None":
        """Return the lock, or None if somebody else holds it; never waits.

        Raises:
            OSError: no file can be made there.
        """
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                if not _take(descriptor):
                    os.close(descriptor)
                    return None
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return cls(path, descriptor)
            except FileNotFoundError:
                pass
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its last owner has removed it since it was opened

    def release(self) -> None:
        """Remove the file and let the next one have its lock."""
        # In this order: who has opened the file meanwhile sees that it is not the lock any more.
        with contextlib.suppress(OSError):
            self._path.unlink()
        _drop(self._descriptor)
        os.close(self._descriptor)


@contextlib.contextmanager
def locked_soon(descriptor: int, patience_seconds: float) -> Iterator[bool]:
    """Wait for the lock of an open file, but not longer than told, and tell whether it is held."""
    deadline = time.monotonic() + patience_seconds
    while not (taken := _take(descriptor)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    try:
        yield taken
    finally:
        if taken:
            _drop(descriptor)


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _drop(descriptor: int) -> None:
    # A child that was forked meanwhile holds the lock as well, unless it is dropped for both.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
