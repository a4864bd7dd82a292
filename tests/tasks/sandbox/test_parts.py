"""The small parts: limits, logs, folders, the process table."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from graphkiln.tasks.sandbox.limits import Limits
from graphkiln.tasks.sandbox.outcome import read_log
from graphkiln.tasks.sandbox.scratch import remove_folder
from graphkiln.tasks.sandbox.tree import ProcessTable, kill_tree, resident_bytes, wait_ended


@pytest.mark.parametrize("name", ["seconds", "memory_bytes", "log_bytes"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_of_nothing_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{"seconds": 1, "memory_bytes": 1, name: value})  # type: ignore[arg-type]


def test_a_log_within_the_limit_is_kept_whole(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert read_log(tmp_path / "log", 10) == (b"0123456789", False)


def test_of_a_log_past_the_limit_head_and_tail_are_kept(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert read_log(tmp_path / "log", 4) == (b"01\n[graphkiln: 6 bytes were left out here]\n89", True)


def test_a_folder_goes_whatever_its_modes(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    inner = tmp_path / "folder" / "locked"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (inner / "link").symlink_to(outside)
    inner.chmod(0o500)
    remove_folder(tmp_path / "folder")
    remove_folder(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]
    assert outside.stat().st_mode & 0o777 == 0o500


def test_a_folder_that_cannot_go_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr("graphkiln.tasks.sandbox.scratch.shutil.rmtree", refuse)
    remove_folder(tmp_path)
    assert "could not be removed" in caplog.text


def test_the_memory_of_one_process_is_its_resident_set() -> None:
    tree = ProcessTable().tree(os.getpid())
    own = {process for process in tree if process.pid == os.getpid()}
    assert len(own) == 1
    assert abs(resident_bytes(own, 0) - psutil.Process().memory_info().rss) < 16 * 2**20


def test_the_memory_of_several_is_never_more_than_the_plain_sum() -> None:
    command = [sys.executable, "-u", "-c", "print('up'); input()"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
    seen = {psutil.Process(process.pid) for process in processes}
    plain = sum(process.memory_info().rss for process in seen)
    assert 0 < resident_bytes(seen, 0) < plain
    assert resident_bytes(seen, plain * 2) == plain
    for process in processes:
        process.communicate(b"\n")
    assert resident_bytes(seen, 0) == 0


def test_a_tree_ends_whole() -> None:
    program = (
        "import os, subprocess as s, sys, time; s.Popen([sys.executable, '-c', {0!r}]); print('up'); time.sleep(600)"
    )
    inner = "import os, time; os.setsid(); time.sleep(600)"
    command = [sys.executable, "-u", "-c", program.format(inner)]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    assert leader.stdout.readline() == b"up\n"
    tree = ProcessTable().tree(leader.pid)
    assert len(tree) == 2
    assert not wait_ended(tree, 0.0)
    assert kill_tree(leader.pid, set()) == tree
    assert wait_ended(tree, 20.0)
    leader.communicate()
    assert ProcessTable().tree(leader.pid) == set()


def test_processes_are_found_by_their_environment() -> None:
    command = [sys.executable, "-u", "-c", "print('up'); input()"]
    environment = {**os.environ, "SANDBOX_TEST": "mark"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert {found.pid for found in ProcessTable().marked("SANDBOX_TEST", "mark")} == {process.pid}
        assert ProcessTable().marked("SANDBOX_TEST", "mar") == set()
        process.communicate(b"\n")
