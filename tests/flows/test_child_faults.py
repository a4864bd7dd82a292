"""Compilers that fail in every way they can: one failed kernel graph, its reason told, all others kept."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import graphkiln
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import NotCommittedError
from graphkiln.storage.store import open_store
from graphkiln.storage.verify import verify_store
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, call

pytestmark = pytest.mark.usefixtures("without_prefect")

KERNELS = {
    "bad": "int run(int a) { return a + 1; }",
    "good": "int run(int a) { return a + 2; }",
    "other": "int run(int a) { return a + 3; }",
}
GREEDY = shlex.join([sys.executable, "-c", "data = b'x' * 400_000_000; import time; time.sleep(600)"])


@dataclass(frozen=True)
class Fault:
    """What the compiler does instead of compiling, and what is told of it.

    Attributes:
        code: shell code.
        reason: the reason of the failure.
        told: part of the message.
        retryable: whether the failure may pass.
        limits: what the spec says of limits.
        logged: whether what the compiler printed before has got into the log for certain.
    """

    code: str
    reason: str
    told: str
    retryable: bool = False
    limits: str = ""
    logged: bool = True


FAULTS = {
    "error": Fault("echo 'input.c:1: error: no such pragma'; exit 1", "compiler-error", "error: no such pragma"),
    "killed": Fault("kill -9 $$", "killed", "SIGKILL", retryable=True),
    "its parent killed": Fault("kill -9 $PPID; exit 0", "killed", "SIGKILL", retryable=True, logged=False),
    "segfault": Fault("kill -SEGV $$", "crashed", "SIGSEGV"),
    "hang": Fault("exec sleep 600", "timeout", "limit of 2 s", limits="compile_seconds = 2"),
    "memory": Fault(f"exec {GREEDY}", "out-of-memory", "limit of 205 MiB", limits="memory_gib = 0.2"),
    "log": Fault(f"yes {'x' * 200} | head -c 100000000", "log-flood", "limit of 64 MiB"),
    "no output": Fault("exit 0", "no-output", "left no file"),
    "empty output": Fault(": > out/kernel.so; exit 0", "no-output", "'kernel.so' empty"),
}


class Project:
    """A network whose compiler fails on one kernel as long as a file exists, and the command line."""

    def __init__(self, folder: Path, fault: Fault, store: str) -> None:
        self.trouble = folder / "trouble"
        self.trouble.touch()
        trouble = shlex.quote(str(self.trouble))
        before = f'echo "at work"; if [ "$kernel" = //bad ] && [ -e {trouble} ]; then {fault.code}; fi'
        self.network = CcNetwork(folder / "network", KERNELS, before=before)
        if fault.limits:
            self.network.limit(fault.limits)
        self.store = store

    def run(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
        return subprocess.run(
            [sys.executable, "-m", "graphkiln", *map(str, arguments), "--store", self.store],
            capture_output=True,
            text=True,
            env=clean,
            timeout=300,
            check=False,
        )

    def compile_as_json(self) -> tuple[int, dict[str, Any]]:
        done = self.run("compile", self.network.spec, "--no-prefect", "--json")
        assert not done.stderr, done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_compiler_that_fails(fault: Fault, tmp_path: Path, store_url: str) -> None:
    project = Project(tmp_path, fault, store_url)
    code, document = project.compile_as_json()
    assert code == 3
    assert document["committed"] is False
    assert document["backend"] == "command"
    graphs = {graph["name"]: graph for graph in document["graphs"]}
    assert {name: graph["state"] for name, graph in graphs.items()} == {
        "bad": "failed",
        "good": "compiled",
        "other": "compiled",
    }
    bad = graphs["bad"]
    assert bad["reason"] == fault.reason
    assert fault.told in bad["message"]
    assert bad["retryable"] == fault.retryable
    # Memory past the limit in a child that has compiled before is tried once more in a fresh one.
    runs = project.network.take_runs()
    assert sorted(set(runs)) == sorted(KERNELS)
    assert len(runs) <= len(KERNELS) + (fault.reason == "out-of-memory")
    with pytest.raises(NotCommittedError):
        graphkiln.load(NAME, target=TARGET, store=store_url)
    if fault.logged:
        _the_log_is_kept(project, Digest(bad["key"]))

    # A failure never stands in for a run, and what succeeded is not run again.
    again = project.run("compile", project.network.spec, "--no-prefect")
    assert again.returncode == 3
    assert f"bad failed in command: {fault.reason}" in again.stdout
    assert fault.told in again.stdout
    assert project.network.take_runs() == ["bad"]

    project.trouble.unlink()
    code, document = project.compile_as_json()
    assert code == 0
    assert document["committed"] is True
    assert {graph["name"]: graph["state"] for graph in document["graphs"]} == {
        "bad": "compiled",
        "good": "cached",
        "other": "cached",
    }
    assert project.network.take_runs() == ["bad"]
    network = graphkiln.load(NAME, target=TARGET, store=store_url)
    assert [call(network, graph, tmp_path / "loaded", 10) for graph in KERNELS] == [11, 12, 13]
    store = open_store(store_url)
    assert store.read_failure(Digest(bad["key"])) is None
    assert not verify_store(store).problems


def _the_log_is_kept(project: Project, key: Digest) -> None:
    store = open_store(project.store)
    assert store.read_action(key) is None
    failure = store.read_failure(key)
    assert failure is not None
    assert failure.log is not None
    assert store.get_blob(failure.log, "the log").startswith(b"at work\n")
    told = project.run("log", NAME, "bad")
    assert told.returncode == 0
    assert told.stdout.startswith("at work\n")
