"""Children end with their pool and with their parent, and nothing is left of them."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from graphkiln.tasks.contracts import ParseRequest
from graphkiln.tasks.sandbox.child import Child
from graphkiln.tasks.sandbox.pool import ChildFailedError, ChildPool, CompileJob

MakePool = Callable[..., ChildPool]
MakeJob = Callable[..., CompileJob]
WaitUntil = Callable[[Callable[[], bool]], None]
IsRunning = Callable[[int], bool]

_PARENT = """
import os, sys, time
from graphkiln.tasks.sandbox.limits import Limits
from graphkiln.tasks.sandbox.pool import ChildPool, CompileJob

do, tell, fork = sys.argv[1:]
limits = Limits(seconds=600, memory_bytes=2**32)
with ChildPool(environment={}, jobs=1, limits=limits) as pool:
    if fork:
        # A process that has a copy of all that the parent holds open, made when the child runs.
        pool.compile("misbehaving", CompileJob(graph="g", payload=b"x", payload_format="f", settings={"do": "echo"}))
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        open(fork, "w").write(str(pid))
    settings = {"do": do, "tell": tell}
    pool.compile("misbehaving", CompileJob(graph="g", payload=b"x", payload_format="f", settings=settings))
"""


@pytest.fixture
def start_parent(
    third_party: Path, scratch: Path, tmp_path: Path, wait_until: WaitUntil
) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts another process that has a child do a job, and waits until that is under way."""

    def start(do: str, fork: str = "") -> subprocess.Popen[bytes]:
        tell = tmp_path / "pid"
        environment = {**os.environ, "PYTHONPATH": str(third_party), "TMPDIR": str(scratch)}
        command = [sys.executable, "-c", _PARENT, do, str(tell), fork]
        parent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        wait_until(lambda: tell.exists() or parent.poll() is not None)
        return parent

    return start


def test_close_ends_a_job_under_way(
    make_pool: MakePool, job: MakeJob, tmp_path: Path, wait_until: WaitUntil, is_running: IsRunning
) -> None:
    errors: list[ChildFailedError] = []

    def work(number: int) -> None:
        with pytest.raises(ChildFailedError) as caught:
            pool.compile("misbehaving", job("hang", tell=str(tmp_path / str(number))))
        errors.append(caught.value)

    pool = make_pool(jobs=2)
    # One more than there are children: it waits for its turn.
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(list(tmp_path.glob("[0-9]"))) == 2)
    pids = [int(path.read_text()) for path in tmp_path.glob("[0-9]")]
    pool.close()
    assert not any(map(psutil.pid_exists, pids))
    for thread in threads:
        thread.join(20)
    assert [(error.reason, error.retryable) for error in errors] == [("interrupted", True)] * 3
    assert sorted(error.log for error in errors) == [b"", b"hanging\n", b"hanging\n"]


@pytest.mark.parametrize(
    "place",
    [
        "child.Child.kill",
        "child.kill_tree",
        "child.wait_ended",
        "child.remove_folder",
        "monitor.Monitor.close",
        "scratch.remove_folder",
    ],
)
def test_a_close_that_is_interrupted_is_finished_by_the_next(
    make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch, scratch: Path, place: str
) -> None:
    pool = make_pool()
    pid = int(pool.compile("misbehaving", job("echo")).value["pid"])
    place = f"graphkiln.tasks.sandbox.{place}"
    with monkeypatch.context() as patch:
        patch.setattr(place, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.close()
    pool.close()
    assert not psutil.pid_exists(pid)
    assert list(scratch.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("graphkiln-monitor")]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_two_that_close_at_once_both_wait_for_the_end(
    make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_end(child: Child) -> int | None:
        ends.append(child.pid)
        # As a signal handler that ends the run might do, in the midst of it.
        pool.close()
        time.sleep(0.5)
        return end(child)

    def close() -> None:
        pool.close()
        left.append(psutil.pid_exists(pid))

    ends: list[int] = []
    left: list[bool] = []
    end = Child.end
    pool = make_pool()
    pid = int(pool.compile("misbehaving", job("echo")).value["pid"])
    monkeypatch.setattr(Child, "end", slow_end)
    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert left == [False] * 3
    assert ends == [pid]


def test_close_leaves_nothing(make_pool: MakePool, job: MakeJob, scratch: Path, tmp_path: Path) -> None:
    def state() -> tuple[set[str], set[int], set[str]]:
        descriptors = {entry.name for entry in Path("/proc/self/fd").iterdir()}
        children = {process.pid for process in psutil.Process().children(recursive=True)}
        return descriptors, children, {thread.name for thread in threading.enumerate()}

    before = state()
    pool = make_pool()
    pool.compile("misbehaving", job("echo"))
    pool.parse("misbehaving", ParseRequest("net", str(tmp_path), "pid", {}, "cpu"))
    for do in ("raise", "exit", "orphan", "kill_self"):
        try:
            pool.compile("misbehaving", job(do))
        except ChildFailedError:
            continue
    assert state() != before
    pool.close()
    assert state() == before
    assert list(scratch.iterdir()) == []


def test_children_get_no_descriptors_but_their_own(make_pool: MakePool, job: MakeJob, tmp_path: Path) -> None:
    with (tmp_path / "opened").open("w") as file:
        os.set_inheritable(file.fileno(), True)  # noqa: FBT003
        value = make_pool().compile("misbehaving", job("descriptors")).value
    own = value["own"].decode().splitlines()
    assert not any("opened" in target for target in own)
    assert sum(target.startswith("socket:") for target in own) == 1
    assert sum(target.startswith("pipe:") for target in own) == 1
    assert value["grandchild"] == b"[]"


@pytest.mark.parametrize("do", ["hang", "hang_with_gil", "hang_with_signals_blocked"])
def test_children_die_with_their_parent(
    start_parent: Callable[..., "subprocess.Popen[bytes]"], wait_until: WaitUntil, is_running: IsRunning, do: str
) -> None:
    parent = start_parent(do)
    children = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
    assert len(children) >= (2 if do == "hang_with_gil" else 1)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(map(is_running, children)))


def test_what_a_killed_parent_left_is_removed_by_the_next(
    start_parent: Callable[..., "subprocess.Popen[bytes]"], make_pool: MakePool, scratch: Path, wait_until: WaitUntil
) -> None:
    parent = start_parent("hang")
    (kept,) = scratch.iterdir()
    with make_pool():
        assert kept.exists()
    parent.kill()
    parent.communicate()
    assert kept.exists()
    with make_pool():
        assert not kept.exists()


def test_children_die_with_their_parent_though_a_fork_of_it_lives(
    start_parent: Callable[..., "subprocess.Popen[bytes]"],
    wait_until: WaitUntil,
    is_running: IsRunning,
    tmp_path: Path,
) -> None:
    parent = start_parent("hang", str(tmp_path / "fork"))
    child, fork = int((tmp_path / "pid").read_text()), int((tmp_path / "fork").read_text())
    try:
        parent.kill()
        parent.wait()
        wait_until(lambda: not is_running(child))
        assert is_running(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
        parent.communicate()


def test_a_pool_that_is_not_closed_does_not_keep_the_parent(third_party: Path, scratch: Path) -> None:
    program = _PARENT.replace("with ChildPool(", "pool = ChildPool(").replace(") as pool:", ")\nif True:")
    environment = {**os.environ, "PYTHONPATH": str(third_party), "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", program + "    print(os.getpid())", "echo", "", ""]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_temporary_folder_that_cannot_be_used(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/self")
    with pytest.raises(ChildFailedError) as caught:
        make_pool()
    assert (caught.value.reason, caught.value.retryable) == ("not-started", True)


def test_an_interrupt_ends_the_job_and_the_pool(
    start_parent: Callable[..., "subprocess.Popen[bytes]"], scratch: Path, is_running: IsRunning
) -> None:
    parent = start_parent("hang")
    children = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=20)
    assert b"KeyboardInterrupt" in errors
    assert children
    assert not any(map(is_running, children))
    assert list(scratch.iterdir()) == []


def test_a_fork_of_the_parent_does_not_close_its_pool(make_pool: MakePool, job: MakeJob) -> None:
    pool = make_pool()
    pid = pool.compile("misbehaving", job("echo")).value["pid"]
    fork = os.fork()
    if fork == 0:
        pool.close()
        os._exit(0)
    os.waitpid(fork, 0)
    assert pool.compile("misbehaving", job("echo")).value["pid"] == pid
