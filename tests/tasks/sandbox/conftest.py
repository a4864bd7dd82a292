import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from graphkiln.storage.canonical import Json
from graphkiln.tasks.sandbox.limits import MIB, Limits
from graphkiln.tasks.sandbox.pool import ChildPool, CompileJob


class MakePool(Protocol):
    def __call__(
        self, *, seconds: float = 30.0, memory_mib: int = 2000, log_mib: int = 8, jobs: int = 2, **variables: str
    ) -> ChildPool: ...


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
        "misbehaving-too = misbehaving:MisbehavingBackend\n"
        "[graphkiln.frontends]\nmisbehaving = misbehaving:MisbehavingFrontend\n"
    )
    return folder


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pools keep their temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def make_pool(third_party: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    """Makes pools whose children find the misbehaving adapters. They are closed after the test, and leave nothing."""
    monkeypatch.setenv("PYTHONPATH", str(third_party))  # for the children that parse
    monkeypatch.syspath_prepend(third_party)
    pools = []

    def make(
        *, seconds: float = 30.0, memory_mib: int = 2000, log_mib: int = 8, jobs: int = 2, **variables: str
    ) -> ChildPool:
        limits = Limits(seconds=seconds, memory_bytes=memory_mib * MIB, log_bytes=log_mib * MIB)
        pools.append(ChildPool(environment=variables, jobs=jobs, limits=limits))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert list(scratch.iterdir()) == []


@pytest.fixture
def job() -> Callable[..., CompileJob]:
    """Makes jobs that ask the misbehaving backend to do something."""

    def make(do: str, *, graph: str = "stage-0", payload: bytes = b"payload", **settings: Json) -> CompileJob:
        return CompileJob(graph=graph, payload=payload, payload_format="fake/1", settings={"do": do, **settings})

    return make


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Waits for something that another process or thread does, and fails if it does not."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    return wait


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    """Tells whether a process runs; one that has ended but was not waited for does not."""

    def running(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return running
