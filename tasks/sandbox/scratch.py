"""Folders for the temporary files of children."""

import logging
import os
import shutil
import stat
from pathlib import Path

_LOGGER = logging.getLogger(__name__)


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
