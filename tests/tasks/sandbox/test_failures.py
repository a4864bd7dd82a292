"""Every way in which a job can fail, with real processes that really die."""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.contracts import ParseRequest
from graphkiln.tasks.sandbox.pool import ChildBadInputError, ChildFailedError, ChildPool, CompileJob

MakePool = Callable[..., ChildPool]
MakeJob = Callable[..., CompileJob]
WaitUntil = Callable[[Callable[[], bool]], None]
IsRunning = Callable[[int], bool]


def _fail(pool: ChildPool, job: CompileJob) -> ChildFailedError:
    """Return the error of a job, after a look whether the pool still works."""
    with pytest.raises(ChildFailedError) as caught:
        pool.compile("misbehaving", job)
    sound = CompileJob(graph="sound", payload=b"x", payload_format="fake/1", settings={"do": "echo"})
    assert pool.compile("misbehaving", sound).value["payload"] == b"x"
    return caught.value


@pytest.mark.parametrize(
    ("do", "reason", "retryable", "message"),
    [
        ("raise", "compiler-error", False, "shapes (3, 4) and (5,) do not match"),
        ("key_error", "compiler-error", False, "KeyError: 'axis'"),
        ("system_exit", "compiler-error", False, "SystemExit: 3"),
        ("own_reason", "no-output", False, "the compiler wrote no file below out/"),
        ("text", "compiler-error", False, "backend misbehaving gave output 'code' as str, not bytes"),
        ("no_space", "disk-full", True, "[Errno 28] No space left on device: '/scratch/x'"),
        ("memory_error", "out-of-memory", False, "cannot have 3 TiB"),
        ("nothing", "no-output", False, "the backend made no output"),
        ("empty", "no-output", False, "the backend made an empty output: constants"),
        ("exit", "crashed", False, "the child ended with exit code 0 and no answer"),
        ("garbage", "crashed", False, "the child gave an answer that cannot be read: not a frame"),
        ("close_connection", "crashed", False, "the child closed its connection"),
        ("segfault", "crashed", False, "the child crashed with SIGSEGV (Segmentation fault)"),
        ("kill_self", "killed", True, "the child was killed from outside (SIGKILL)"),
        ("fork_holds_socket", "crashed", False, "the child ended with exit code 0 and no answer"),
    ],
)
def test_a_failure_has_reason_and_message(
    make_pool: MakePool, job: MakeJob, do: str, reason: str, retryable: bool, message: str
) -> None:
    error = _fail(make_pool(jobs=1), job(do))
    assert str(error).startswith(message)
    assert (error.reason, error.retryable) == (reason, retryable)
    assert error.seconds > 0


@pytest.mark.parametrize(
    ("do", "kept"),
    [
        ("raise", b"ValueError: shapes (3, 4) and (5,) do not match"),
        ("raise", b"about to fail"),
        ("exit", b"leaving"),
        ("kill_self", b"last words"),
        ("segfault", b"Fatal Python error: Segmentation fault"),
    ],
)
def test_a_failure_keeps_the_log(make_pool: MakePool, job: MakeJob, do: str, kept: bytes) -> None:
    assert kept in _fail(make_pool(jobs=1), job(do)).log


def test_bad_input_stays_bad_input(make_pool: MakePool, job: MakeJob, tmp_path: Path) -> None:
    pool = make_pool()
    with pytest.raises(BadInputError, match="must be a power of two") as caught:
        pool.compile("misbehaving", job("bad_input"))
    assert caught.value.reason == "bad-tiles"
    assert isinstance(caught.value, ChildBadInputError)
    assert b"looking at the options" in caught.value.log
    with pytest.raises(BadInputError, match=r"x\.py:y does not exist") as caught:
        pool.parse("misbehaving", ParseRequest("net", str(tmp_path), "raise", {}, "cpu"))
    assert caught.value.reason == "bad-entrypoint"
    with pytest.raises(BadInputError, match="unknown backend: 'misbehavin'; did you mean") as caught:
        pool.compile("misbehavin", job("echo"))
    assert caught.value.reason == "unknown-backend"


def test_bad_input_that_comes_of_the_users_code_keeps_its_traceback(make_pool: MakePool, job: MakeJob) -> None:
    with pytest.raises(ChildBadInputError) as caught:
        make_pool().compile("misbehaving", job("bad_input_of_user"))
    assert b"ZeroDivisionError: in the user's own code" in caught.value.log


def test_a_frontend_that_crashes_or_gives_nonsense(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool()
    for entrypoint, reason in (("crash", "crashed"), ("wrong", "compiler-error")):
        with pytest.raises(ChildFailedError) as caught:
            pool.parse("misbehaving", ParseRequest("net", str(tmp_path), entrypoint, {}, "cpu"))
        assert caught.value.reason == reason
        assert b"parsing net" in caught.value.log


def test_a_child_killed_from_outside(make_pool: MakePool, job: MakeJob, tmp_path: Path, wait_until: WaitUntil) -> None:
    def kill() -> None:
        wait_until(tell.exists)
        os.kill(int(tell.read_text()), signal.SIGKILL)

    tell = tmp_path / "pid"
    killer = threading.Thread(target=kill)
    killer.start()
    error = _fail(make_pool(), job("hang", tell=str(tell)))
    killer.join()
    assert (error.reason, error.retryable) == ("killed", True)
    assert error.log == b"hanging\n"


def test_a_job_that_takes_too_long(make_pool: MakePool, job: MakeJob, tmp_path: Path, is_running: IsRunning) -> None:
    tell = tmp_path / "pid"
    error = _fail(make_pool(seconds=0.7), job("hang", tell=str(tell)))
    assert (error.reason, error.retryable) == ("timeout", False)
    assert "0.7 s" in str(error)
    assert 0.7 <= error.seconds < 10
    assert error.log == b"hanging\n"
    assert not is_running(int(tell.read_text()))


@pytest.mark.parametrize("do", ["memory", "memory_in_daemon"])
def test_a_job_that_takes_too_much_memory(make_pool: MakePool, job: MakeJob, do: str) -> None:
    error = _fail(make_pool(memory_mib=200), job(do))
    assert (error.reason, error.retryable) == ("out-of-memory", False)
    assert error.peak_memory_bytes > 200 * 2**20
    assert "the limit of 200 MiB" in str(error)


def test_a_job_that_floods_its_log(make_pool: MakePool, job: MakeJob) -> None:
    error = _fail(make_pool(log_mib=4), job("flood"))
    assert (error.reason, error.retryable) == ("log-flood", False)
    assert error.log.startswith(b"the first line\n")
    assert len(error.log) < 3 * 2**20
    assert b"bytes were left out here]" in error.log


def test_a_flood_counts_even_if_the_job_is_done_first(make_pool: MakePool, job: MakeJob) -> None:
    assert _fail(make_pool(log_mib=1), job("short_flood")).reason == "log-flood"


def test_an_answer_larger_than_the_memory_limit_is_not_read(make_pool: MakePool, job: MakeJob) -> None:
    error = _fail(make_pool(memory_mib=100), job("announces_too_much"))
    assert error.reason == "crashed"
    assert "at most 104857600 may come" in str(error)


def test_descendants_of_a_crashed_child_end(
    make_pool: MakePool, job: MakeJob, tmp_path: Path, wait_until: WaitUntil, is_running: IsRunning
) -> None:
    tell = tmp_path / "pids"
    error = _fail(make_pool(), job("daemon_then_crash", tell=str(tell)))
    assert "SIGABRT" in str(error)
    pids = [int(pid) for pid in tell.read_text().split()]
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_child_that_died_while_idle_is_replaced(
    make_pool: MakePool, job: MakeJob, wait_until: WaitUntil, is_running: IsRunning
) -> None:
    pool = make_pool(jobs=1)
    pid = int(pool.compile("misbehaving", job("echo")).value["pid"])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    assert int(pool.compile("misbehaving", job("echo")).value["pid"]) != pid


def test_a_child_that_dies_as_the_job_comes_is_replaced(
    make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(jobs=1)
    pid = int(pool.compile("misbehaving", job("echo")).value["pid"])
    os.kill(pid, signal.SIGKILL)
    monkeypatch.setattr("graphkiln.tasks.sandbox.pool.Child.has_exited", lambda child: False)
    monkeypatch.setattr("graphkiln.tasks.sandbox.pool.Child.exits_within", lambda child, seconds: True)
    assert int(pool.compile("misbehaving", job("echo")).value["pid"]) != pid


def test_a_child_that_cannot_start_says_why(
    make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('this interpreter is broken')")
    with pytest.raises(ChildFailedError) as caught:
        make_pool(PYTHONPATH=str(tmp_path)).compile("misbehaving", job("echo"))
    assert caught.value.reason == "crashed"
    assert b"this interpreter is broken" in caught.value.log


def test_a_disk_that_is_full_before_the_job(make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    pool = make_pool()
    monkeypatch.setattr("graphkiln.tasks.sandbox.child.socket.socketpair", refuse)
    with pytest.raises(ChildFailedError) as caught:
        pool.compile("misbehaving", job("echo"))
    assert (caught.value.reason, caught.value.retryable) == ("disk-full", True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # noqa: S607


@pytest.mark.parametrize("before", [True, False])
def test_a_disk_that_is_full_is_the_reason(
    make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch, small_disk: Path, before: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    pool = make_pool(jobs=1)
    if before:
        _fill(small_disk)
    with pytest.raises(ChildFailedError) as caught:
        pool.compile("misbehaving", job("echo") if before else job("fill_disk"))
    assert (caught.value.reason, caught.value.retryable) == ("disk-full", True)
    pool.close()
    assert [path.name for path in small_disk.iterdir()] == (["filler"] if before else [])


def _fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def test_a_crash_while_there_is_room_stays_a_crash(
    make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch, small_disk: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    pool = make_pool()
    with pytest.raises(ChildFailedError) as caught:
        pool.compile("misbehaving", job("exit"))
    assert caught.value.reason == "crashed"
    pool.close()
