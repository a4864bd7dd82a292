"""Real file systems of a few hundred kilobytes, which can be filled."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Mount:
    """A file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def run(self, program: str, *arguments: str) -> None:
        found = shutil.which(program)
        if found is None:
            pytest.skip(f"there is no {program} here")
        done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{program} is not permitted here: {done.stderr.strip()}")

    def remount(self, options: str) -> None:
        self.run("mount", "-o", f"remount,{options}", str(self.path))

    def used(self) -> dict[str, int]:
        """Return how many blocks and how many inodes are in use."""
        found = os.statvfs(self.path)
        return {"blocks": found.f_blocks - found.f_bfree, "inodes": found.f_files - found.f_ffree}

    def fill(self, *, blocks: int | None = 0, inodes: int | None = None) -> None:
        """Leave only so many blocks, or inodes, free; None for as many as there are."""
        self._filler.mkdir()
        found = os.statvfs(self.path)
        if blocks is not None and found.f_bfree > blocks:
            with (self._filler / "blocks").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, (found.f_bfree - blocks) * found.f_bsize)
        if inodes is not None:
            for number in range(os.statvfs(self.path).f_ffree - inodes):
                (self._filler / str(number)).touch()

    def empty(self) -> None:
        """Free again what was filled."""
        shutil.rmtree(self._filler)


@contextmanager
def small_disk(path: Path, options: str) -> Iterator[Mount]:
    """Mount a tmpfs there, or skip the test where that is not permitted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mounted = Mount(path)
    path.mkdir()
    mounted.run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path))
    try:
        yield mounted
    finally:
        mounted.run("umount", str(path))
