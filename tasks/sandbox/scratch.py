"""Folders for the temporary files of children."""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from socket import gethostname

_LOGGER = logging.getLogger(__name__)


class Scratch:
    """A new folder for temporary files, removed by `close`.

    Folders of owners on this host that were killed before they could do so are removed when the next one is made:
    an owner holds a lock on its folder, which the kernel lets go of when the owner ends.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        prefix = f"graphkiln-children-{gethostname()}-"
        _remove_abandoned(prefix)
        # It gets the name that others look for only when it is locked, so that no one takes it for abandoned.
        unlocked = Path(tempfile.mkdtemp(prefix="graphkiln-new-"))
        self._lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
        self._closed = False
        # Where folders cannot be locked (NFS), nobody can lock this one to remove it either.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = unlocked.rename(unlocked.with_name(unlocked.name.replace("graphkiln-new-", prefix)))

    def close(self) -> None:
        """Remove the folder. Where an exception interrupts it, the next call goes on."""
        remove_folder(self.path)
        if not self._closed:
            self._closed = True
            os.close(self._lock)


def remove_folder(folder: Path) -> None:
    """Remove a folder and what compilers left in it, folders without write permission included.

    What cannot be removed is left with a warning: the job's result does not depend on it.
    """
    try:
        shutil.rmtree(folder)
        return
    except FileNotFoundError:
        return
    except OSError:
        for path, folders, _ in os.walk(folder):
            for inner in (Path(path, name) for name in folders):
                if not inner.is_symlink():
                    inner.chmod(stat.S_IRWXU)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _LOGGER.warning("temporary files in %s could not be removed: %s", folder, error)


def _remove_abandoned(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.ExitStack() as stack:
            try:
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # its owner lives, or is another user; or it has gone by now
            remove_folder(folder)
