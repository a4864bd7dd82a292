"""Prefect's embedded server: it belongs to one run of the command line, and goes with it, however that ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from graphkiln.flows.embedded_server import EmbeddedServer

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.xdist_group("embedded-server"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no cc"),
]

SPEC = """
[network]
name = "kernels"
frontend = "file"
entrypoint = "kernels/*.c"
[targets.native]
backend = "command"
argv = ["sh", "-c", {script}, "{{input}}", "{{output}}"]
version_argv = []
"""
# A kernel that is called `gated` compiles once there is a file `gate`.
SCRIPT = (
    "if grep -q gated $0; then while ! test -e {gate}; do sleep 0.05; done; fi; "
    'if grep -q broken $0; then echo broken; exit 1; fi; exec cc -shared -fPIC "$0" -o "$1"'
)


class Scene:
    """A spec, a store and the command line; all processes that it started are ended after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gate = folder / "gate"
        self.home = folder / "home"
        self.home.mkdir()
        (folder / "kernels").mkdir()
        script = json.dumps(SCRIPT.format(gate=self.gate))
        (folder / "spec.toml").write_text(SPEC.format(script=script))
        self.write("add", "gated", "subtract")
        self.started: list[psutil.Process] = []

    def write(self, *kernels: str) -> None:
        for name in kernels:
            (self.folder / "kernels" / f"{name}.c").write_text(f"int {name}(int a) {{ return a + 1; }}\n")

    def environment(self, **more: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
        own = {
            "HOME": str(self.home),
            "PREFECT_HOME": str(self.home / ".prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "GRAPHKILN_STORE": str(self.folder / "store"),
        }
        return {**clean, **own, **more}

    def start(self, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "graphkiln", "compile", "spec.toml"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment(**environment),
            start_new_session=True,
        )
        self.started.append(psutil.Process(process.pid))
        return process

    def server_of(self, process: "subprocess.Popen[str]") -> psutil.Process:
        found: list[psutil.Process] = []

        def has_started() -> bool:
            children = psutil.Process(process.pid).children()
            found[:] = [child for child in children if "graphkiln.flows.embedded_server" in command_of(child)]
            return bool(found)

        until(has_started)
        self.started += found
        return found[0]

    def end(self) -> None:
        self.gate.touch()
        for process in self.started:
            if is_running(process):
                process.kill()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.end()


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def read_until(process: "subprocess.Popen[str]", text: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was not printed, but {lines}")


def test_it_is_announced_and_the_compilers_work_meanwhile(scene: Scene) -> None:
    # A proxy leads to other hosts, and not to the server.
    process = scene.start(http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
    read_until(process, "starting Prefect's embedded server, which takes 10 to 20 s; the compilers are at work")
    server = scene.server_of(process)
    read_until(process, "compiled  subtract")
    database = scene.home / ".prefect" / "prefect.db"
    assert not database.exists()  # the server is not even half-way, and two of three are done
    scene.gate.touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "3 compiled; committed manifest" in out
    assert err == ""
    assert not is_running(server)
    assert database.exists()  # the run's history is kept


def test_ctrl_c_while_it_starts(scene: Scene) -> None:
    process = scene.start()
    read_until(process, "starting Prefect's embedded server")
    server = scene.server_of(process)
    read_until(process, "compiled  subtract")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "interrupted: what had compiled is kept"
    until(lambda: not any(map(is_running, [server, *children])))


@pytest.mark.parametrize("ready", [False, True], ids=["starting", "at-work"])
def test_sigkill_leaves_no_process(scene: Scene, ready: bool) -> None:
    process = scene.start()
    read_until(process, "starting Prefect's embedded server")
    server = scene.server_of(process)
    read_until(process, "compiled  subtract")
    if ready:
        until(lambda: any(item.status == psutil.CONN_LISTEN for item in server.net_connections()), 60)
        until(lambda: (scene.home / ".prefect" / "prefect.db").exists(), 60)
    children = psutil.Process(process.pid).children(recursive=True)
    assert server in children
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not any(map(is_running, children)))


def test_one_that_cannot_start_is_one_clear_line(scene: Scene) -> None:
    scene.gate.touch()
    (scene.folder / "no-folder").touch()
    # Both at once: each takes as long as a server takes to start.
    unwritable = scene.start(PREFECT_HOME=str(scene.folder / "no-folder" / "home"))
    unknown = scene.start(PREFECT_API_DATABASE_CONNECTION_URL="foo://bar")
    for process, told in (
        (unwritable, "OperationalError: (sqlite3.OperationalError) unable to open database file"),
        (unknown, "NoSuchModuleError: Can't load plugin: sqlalchemy.dialects:foo"),
    ):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "Traceback" not in err
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert line.startswith(f"error: Prefect's embedded server did not start: {told}; ")
        assert "--no-prefect" in line


def test_a_server_that_goes_away_in_the_middle_of_a_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in scene.environment().items():
        monkeypatch.setenv(name, value)
    server = EmbeddedServer()
    try:
        server.wait_until_ready()
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{server.url}/health") as answer:
            assert answer.read() == b"true"
        # Without tries: a server that restarts is waited for, for about half a minute.
        process = scene.start(PREFECT_API_URL=server.url, PREFECT_CLIENT_MAX_RETRIES="0")
        read_until(process, "compiled  subtract")
    finally:
        server.stop()
    scene.gate.touch()
    out, err = process.communicate(timeout=60)  # Prefect alone would try for minutes to send what it has
    # Everything compiled and is committed: Prefect has no say in that.
    assert process.returncode == 0
    assert "3 compiled; committed manifest" in out
    assert "Prefect's server went away before the end of the run" in " ".join(err.split())
    assert "Traceback" not in err

    # No server at all now: nothing is started, and what is there is kept.
    scene.write("broken")
    process = scene.start(PREFECT_API_URL=server.url)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("error: Prefect's server cannot be used: Failed to reach API at ")
    assert len(err.splitlines()) == 1
