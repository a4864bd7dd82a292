"""Small disks of their own, for tests of what happens when one is full or read-only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Mount:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, program: str, *arguments: str) -> None:
        found = shutil.which(program)
        if found is None:
            pytest.skip(f"there is no {program} here")
        done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{program} is not permitted here: {done.stderr.strip()}")

    def remount(self, options: str) -> None:
        self.run("mount", "-o", f"remount,{options}", str(self.path))


@contextmanager
def mounted_at(path: Path, size: str) -> Iterator[Mount]:
    """Mount a file system in memory, of a size such as ``1m``."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mounted = Mount(path)
    mounted.path.mkdir()
    mounted.run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mounted.path))
    try:
        yield mounted
    finally:
        mounted.run("umount", str(mounted.path))
