import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from graphkiln.tasks.sandbox.limits import MIB, Limits
from graphkiln.tasks.sandbox.pool import ChildPool

MakePool = Callable[..., ChildPool]


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the misbehaving adapters are installed, as pip would do it."""
    folder = tmp_path_factory.mktemp("third-party")
    shutil.copy(Path(__file__).with_name("misbehaving.py"), folder)
    metadata = folder / "misbehaving-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[graphkiln.backends]\nmisbehaving = misbehaving:MisbehavingBackend\n"
        "[graphkiln.frontends]\nmisbehaving = misbehaving:MisbehavingFrontend\n"
    )
    return folder


@pytest.fixture
def make_pool(third_party: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    """Makes pools whose children find the misbehaving adapters; they are closed after the test."""
    monkeypatch.setenv("PYTHONPATH", str(third_party))
    pools = []

    def make(*, seconds: float = 30.0, memory_mib: int = 2000, log_mib: int = 8, jobs: int = 2, **variables: str) -> ChildPool:
        limits = Limits(seconds=seconds, memory_bytes=memory_mib * MIB, log_bytes=log_mib * MIB)
        pool = ChildPool(environment=variables, jobs=jobs, limits=limits)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another process does; fail if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants() -> set[int]:
    """The processes below this one, but for zombies that others are to wait for."""
    return {process.pid for process in psutil.Process(os.getpid()).children(recursive=True)}
