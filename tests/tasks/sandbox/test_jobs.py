"""What jobs that go well give back, and in which surroundings they run."""

import ctypes
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import graphkiln
from graphkiln.storage.ranks import RankSet
from graphkiln.tasks.contracts import ParseRequest
from graphkiln.tasks.sandbox.pool import ChildBadInputError, ChildFailedError, ChildPool, CompileJob

MakePool = Callable[..., ChildPool]
MakeJob = Callable[..., CompileJob]


def _request(folder: Path, entrypoint: str, **parameters: int) -> ParseRequest:
    return ParseRequest("net", str(folder), entrypoint, {**parameters}, "cpu")


def test_a_compile_gives_outputs_log_and_usage(make_pool: MakePool, job: MakeJob) -> None:
    result = make_pool().compile("misbehaving", job("echo", payload=b"\x00\xff"))
    assert result.value["payload"] == b"\x00\xff"
    assert result.log == b"compiling stage-0 as fake/1\n"
    assert 0 < result.seconds < 30
    assert 5 * 2**20 < result.peak_memory_bytes < 500 * 2**20


def test_a_parse_gives_graphs_and_log(make_pool: MakePool, tmp_path: Path) -> None:
    result = make_pool().parse("misbehaving", _request(tmp_path, "text", layers=3))
    first, second = result.value
    assert (first.name, first.payload, first.payload_format) == ("stage-0", b"text", "fake/1")
    assert first.ranks == RankSet.parse("0-15,32")
    assert second.payload == b"{'layers': 3}"
    assert result.log == b"parsing net\n"


def test_a_compile_child_is_reused_and_a_parse_child_is_not(make_pool: MakePool, job: MakeJob, tmp_path: Path) -> None:
    pool = make_pool()
    compiled = {pool.compile("misbehaving", job("echo")).value["pid"] for _ in range(3)}
    parsed = {pool.parse("misbehaving", _request(tmp_path, "pid")).value[0].payload for _ in range(3)}
    assert len(compiled) == 1
    assert len(parsed) == 3
    assert not compiled & parsed


def test_a_child_serves_one_adapter_only(make_pool: MakePool, job: MakeJob) -> None:
    pool = make_pool(jobs=1)
    pid = pool.compile("misbehaving", job("echo")).value["pid"]
    assert pool.compile("misbehaving-too", job("echo")).value["pid"] != pid
    # There is room for one child, so the first one had to go.
    assert pool.compile("misbehaving", job("echo")).value["pid"] != pid


def test_logs_of_one_child_are_kept_apart(make_pool: MakePool, job: MakeJob) -> None:
    pool = make_pool(jobs=1)
    for graph in ("a", "b"):
        log = pool.compile("misbehaving", job("prints", graph=graph)).log.decode()
        assert sorted(log.splitlines()) == [
            f"C says {graph}",
            f"grandchild says {graph}",
            f"python says {graph}",
            f"python warns of {graph}",
        ]


def test_a_child_that_left_descendants_is_not_reused(
    make_pool: MakePool, job: MakeJob, is_running: Callable[[int], bool]
) -> None:
    pool = make_pool(jobs=1)
    first = pool.compile("misbehaving", job("daemon")).value
    assert not is_running(int(first["daemon"]))
    assert not is_running(int(first["pid"]))
    assert pool.compile("misbehaving", job("echo")).value["pid"] != first["pid"]


def test_a_descendant_without_parent_ends_with_the_job(
    make_pool: MakePool, job: MakeJob, is_running: Callable[[int], bool]
) -> None:
    daemon = make_pool().compile("misbehaving", job("orphan")).value["daemon"]
    assert not is_running(int(daemon))


def test_large_payloads_and_outputs_pass(make_pool: MakePool, job: MakeJob) -> None:
    pool = make_pool()
    size = 200 * 2**20
    result = pool.compile("misbehaving", job("big", bytes=size))
    assert len(result.value["big"]) == size
    assert set(result.value["big"][:: 2**20]) == {7}
    payload = b"0123456789abcdef" * 2**22
    assert pool.compile("misbehaving", job("echo", payload=payload)).value["payload"] == payload


def test_at_most_so_many_children_work_at_once(make_pool: MakePool, job: MakeJob) -> None:
    pool = make_pool(jobs=2)
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda _: pool.compile("misbehaving", job("times")), range(6)))
    spans = [tuple(map(float, result.value["span"].split())) for result in results]
    assert max(sum(start <= moment < stop for start, stop in spans) for moment, _ in spans) == 2
    assert len({result.value["pid"] for result in results}) == 2


def test_compile_children_see_little_of_the_environment(
    make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_TEST", "stray")
    monkeypatch.setenv("LC_TIME", "C.UTF-8")
    result = make_pool(XLA_FLAGS="--one --two").compile("misbehaving", job("environment"))
    variables = dict(line.split("=", 1) for line in result.value["environment"].decode().splitlines())
    assert "SANDBOX_TEST" not in variables
    assert variables["XLA_FLAGS"] == "--one --two"
    assert variables["LC_TIME"] == "C.UTF-8"
    assert variables["PYTHONHASHSEED"] == "0"
    assert result.value["folder"].decode().startswith(variables["TMPDIR"])


def test_nothing_on_pythonpath_runs_as_a_compile_child_starts(
    make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['XLA_FLAGS'] = '--stray'")
    pool = make_pool()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    variables = pool.compile("misbehaving", job("environment")).value["environment"].decode()
    assert "--stray" not in variables
    assert not [line for line in variables.splitlines() if line.startswith(("PYTHONPATH=", "PYTHONHOME="))]


def test_parse_children_see_the_whole_environment_but_the_signing_key(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SANDBOX_TEST", "wanted")
    monkeypatch.setenv("GRAPHKILN_SIGNING_KEY", "secret")
    graphs = make_pool().parse("misbehaving", _request(tmp_path, "environment")).value
    assert graphs[0].payload == b"wanted,none"


def test_a_parse_starts_in_the_folder_of_the_spec(make_pool: MakePool, tmp_path: Path) -> None:
    graphs = make_pool().parse("misbehaving", _request(tmp_path, "cwd")).value
    assert Path(graphs[0].payload.decode()) == tmp_path
    with pytest.raises(ChildBadInputError, match="does not exist") as caught:
        make_pool().parse("misbehaving", _request(tmp_path / "gone", "cwd"))
    assert caught.value.reason == "missing-folder"


def test_children_run_the_same_graphkiln_whatever_lies_around(
    make_pool: MakePool, job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("graphkiln", "msgspec", "tasks", "storage"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    value = make_pool().compile("misbehaving", job("imports")).value
    assert value["graphkiln"].decode() == graphkiln.__file__
    path = value["path"].decode().splitlines()
    assert "" not in path
    assert path.index(str(tmp_path)) > max(index for index, entry in enumerate(path) if "site-packages" in entry)
    assert not {"jax", "prefect", "pyarrow", "numpy"} & set(value["modules"].decode().split())


def test_temporary_files_go_with_the_child(make_pool: MakePool, job: MakeJob, scratch: Path) -> None:
    pool = make_pool()
    value = pool.compile("misbehaving", job("leave_file")).value
    assert value["tmp"] == value["cwd"]
    assert scratch in Path(value["tmp"].decode()).parents
    assert (Path(value["tmp"].decode()) / "left-behind").exists()
    pool.close()
    assert list(scratch.iterdir()) == []


def test_the_files_of_a_job_go_with_the_job(make_pool: MakePool, job: MakeJob, scratch: Path) -> None:
    make_pool().compile("misbehaving", job("echo"))
    assert [path.name for path in scratch.rglob("*") if path.is_file()] == ["start.log"]


def test_memory_that_forks_share_counts_once(make_pool: MakePool, job: MakeJob) -> None:
    result = make_pool(memory_mib=300).compile("misbehaving", job("forks_share_memory"))
    assert 80 * 2**20 < result.peak_memory_bytes < 250 * 2**20


def test_memory_left_by_earlier_jobs_does_not_fail_a_job(make_pool: MakePool, job: MakeJob) -> None:
    pool = make_pool(jobs=1, memory_mib=220)
    pids = [pool.compile("misbehaving", job("keep_memory")).value["pid"] for _ in range(5)]
    assert len(set(pids)) == 2


def test_a_short_peak_is_seen(make_pool: MakePool, job: MakeJob) -> None:
    pool = make_pool(jobs=1)
    high = pool.compile("misbehaving", job("big", bytes=100 * 2**20)).peak_memory_bytes
    low = pool.compile("misbehaving", job("echo")).peak_memory_bytes
    assert high > 100 * 2**20 > low


def test_a_waiting_thread_sees_an_exception_from_another_thread(
    make_pool: MakePool, job: MakeJob, tmp_path: Path, wait_until: Callable[..., None], is_running: Callable[..., bool]
) -> None:
    caught: list[BaseException] = []

    def work() -> None:
        with pytest.raises(KeyboardInterrupt) as error:
            pool.compile("misbehaving", job("hang", tell=str(tmp_path / "pid")))
        caught.append(error.value)

    pool = make_pool()
    thread = threading.Thread(target=work)
    thread.start()
    wait_until((tmp_path / "pid").exists)
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
    thread.join(20)
    assert caught
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert pool.compile("misbehaving", job("echo")).value


def test_a_closed_pool_takes_no_jobs(make_pool: MakePool, job: MakeJob) -> None:
    pool = make_pool()
    pool.close()
    pool.close()
    with pytest.raises(ChildFailedError) as caught:
        pool.compile("misbehaving", job("echo"))
    assert (caught.value.reason, caught.value.retryable) == ("interrupted", True)
