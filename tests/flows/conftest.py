import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphkiln.flows.embedded_server import EmbeddedServer
from tests.flows.prefect_api import Server

_KERNELS = {
    "negate": "int run(int a) { return -a; }",
    "scale": "int run(int a) { return 3 * a; }",
    "shift": "int run(int a) { return a + 11; }",
}
_SPEC = """
[network]
name = "kernels"
frontend = "file"
entrypoint = "kernels/*.c"

[parameters]
ranks = "0-3"

[targets.native]
backend = "command"
argv = ["cc", "-O1", "-shared", "-fPIC", "{input}", "-o", "{output}"]
output_name = "kernel.so"
tools = ["as", "ld"]
"""


@pytest.fixture
def cc_network(tmp_path: Path) -> Path:
    """The spec of a network of three C kernels for the real `cc`: negate, scale and shift."""
    folder = tmp_path / "network"
    (folder / "kernels").mkdir(parents=True)
    for kernel, source in _KERNELS.items():
        (folder / "kernels" / f"{kernel}.c").write_text(f"{source}\n")
    spec = folder / "kernels.toml"
    spec.write_text(_SPEC)
    return spec


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """A store that does not exist yet."""
    return str(tmp_path / "store")


@pytest.fixture
def without_prefect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Prefect server is configured, whatever the user has."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder in memory if that can be: all calls are the same, but thousands of them wait for no disk."""
    memory = Path("/dev/shm")  # noqa: S108
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prefect server. Tests that use it belong to the group `prefect`, so that one worker starts one."""
    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:
            patch.delenv(name)
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        embedded = EmbeddedServer()
    try:
        embedded.wait_until_ready()
        yield Server(embedded.url, home)
    finally:
        embedded.stop()
