"""Many runs on one cold store: each kernel graph is compiled once between them, whatever becomes of a run."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from graphkiln.storage import layout
from graphkiln.storage.documents import seal
from graphkiln.storage.leases import LeaseRecord
from graphkiln.storage.store import Store
from tests.flows.cc_networks import NAME, CcNetwork
from tests.flows.stand_in_workers import LEASE_SECONDS as STAND_IN_LEASE_SECONDS
from tests.flows.stand_in_workers import run
from tests.storage.faults import DictFilesystem

KERNELS = {name: f"int run(int x) {{ return x + {number}; }}" for number, name in enumerate(["one", "two", "three"])}
LEASE_SECONDS = 2
# Long enough that runs which start together meet, and part of the program under test.
TAKES_A_WHILE = "sleep 0.5"

Run = subprocess.Popen[str]


def start(network: CcNetwork, store: str | Path, *options: str) -> Run:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.Popen(
        [
            *(sys.executable, "-u", "-m", "graphkiln", "compile", str(network.spec), "--no-prefect"),
            "--store",
            str(store),
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, "PREFECT_HOME": str(network.folder)},
    )


@contextmanager
def ended(runs: list[Run]) -> Iterator[None]:
    """See to it that no run outlives the block."""
    try:
        yield
    finally:
        for run in runs:
            run.kill()
            run.communicate()


def documents(runs: list[Run]) -> list[dict[str, Any]]:
    with ended(runs):
        return [json.loads(run.communicate(timeout=300)[0]) for run in runs]


def states(document: Mapping[str, Any]) -> dict[str, str]:
    return {graph["name"]: graph["state"] for graph in document["graphs"]}


def found_by_many(
    count: int, network: CcNetwork, store: str | Path, storage_options: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return what each of so many processes got that called `ensure` at the same moment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    program = Path(__file__).with_name("simultaneous_runs.py")
    runs = subprocess.Popen(
        [sys.executable, program, str(count), str(network.spec), str(store), json.dumps(storage_options or {})],
        stdout=subprocess.PIPE,
        text=True,
        env={**clean, "PREFECT_HOME": str(network.folder)},
        start_new_session=True,
    )
    try:
        printed, _ = runs.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(runs.pid, signal.SIGKILL)
    assert runs.returncode == 0
    found = [json.loads(line) for line in printed.splitlines()]
    assert len(found) == count
    return found


@pytest.mark.slow
def test_64_processes_compile_each_kernel_graph_once_and_all_of_them_load(tmp_path: Path) -> None:
    network = CcNetwork(tmp_path / "network", KERNELS, before=TAKES_A_WHILE)
    store = tmp_path / "store"
    first, *others = found_by_many(64, network, store)
    assert first["outputs"] == {kernel: ["kernel.so"] for kernel in KERNELS}
    assert all(other == first for other in others)
    assert network.runs() == sorted(KERNELS)
    (manifest,) = (store / layout.MANIFESTS).rglob("*/*")
    assert manifest.name == first["manifest"]
    assert not list((store / layout.LEASES).rglob("*/*"))


def test_runs_that_share_kernel_graphs_share_the_work(tmp_path: Path) -> None:
    """Two networks, of which each has one kernel that the other has not."""
    shared = dict(list(KERNELS.items())[:2])
    network = CcNetwork(tmp_path / "a", {**shared, "three": KERNELS["three"]}, before=TAKES_A_WHILE)
    other = tmp_path / "a" / "other.toml"
    other.write_text(
        network.spec.read_text().replace(f'name = "{NAME}"', 'name = "other"').replace("kernels/*.c", "kernels/t*.c")
    )
    runs = [start(network, tmp_path / "store", "--json")]
    network.spec = other
    runs.append(start(network, tmp_path / "store", "--json"))
    first, second = documents(runs)
    assert first["committed"] and second["committed"]
    assert network.runs() == sorted(KERNELS)
    assert Counter([*states(first).values(), *states(second).values()]) == {"compiled": 3, "cached": 2}


def test_a_killed_owners_compile_is_taken_over(tmp_path: Path) -> None:
    """The first run hangs in its compiler and is killed; the second says for whom it waits, then does it itself."""
    hang_once = f"[ -e {tmp_path}/hung ] || {{ touch {tmp_path}/hung; sleep 600; }}"
    network = CcNetwork(tmp_path / "network", {"one": KERNELS["one"]}, before=hang_once)
    network.limit(f"lease_seconds = {LEASE_SECONDS}")
    owner = start(network, tmp_path / "store")
    with ended([owner]):
        assert owner.stdout is not None
        assert any(line.startswith("  compiling one") for line in owner.stdout)
        waiter = start(network, tmp_path / "store")
        with ended([waiter]):
            assert waiter.stdout is not None
            waiting = next(line for line in waiter.stdout if line.startswith("  waiting"))
            assert f"process {owner.pid} on " in waiting
            owner.kill()
            rest, warnings = waiter.communicate(timeout=60)
    assert waiter.returncode == 0, rest
    assert "compiled  one" in rest
    assert f"from process {owner.pid} on " in warnings


def test_a_failed_compile_fails_those_who_wait_for_it(tmp_path: Path) -> None:
    network = CcNetwork(tmp_path / "network", {"one": "int run(int x) { return x +; }"}, before=TAKES_A_WHILE)
    found = documents([start(network, tmp_path / "store", "--json") for _ in range(6)])
    assert [states(document) for document in found] == [{"one": "failed"}] * 6
    assert all("expected expression" in document["graphs"][0]["message"] for document in found)
    # Whoever came too late to wait has tried for itself, as a failure never stands in for a later run.
    assert len(network.runs()) < 6
    again = documents([start(network, tmp_path / "store", "--json")])
    assert states(again[0]) == {"one": "failed"}


def test_of_those_who_wait_for_a_compile_that_was_killed_one_tries_again(tmp_path: Path) -> None:
    die_once = f"{TAKES_A_WHILE}; [ -e {tmp_path}/died ] || {{ touch {tmp_path}/died; kill -9 $$; }}"
    network = CcNetwork(tmp_path / "network", {"one": KERNELS["one"]}, before=die_once)
    found = documents([start(network, tmp_path / "store", "--json") for _ in range(4)])
    assert Counter(states(document)["one"] for document in found) == {"failed": 1, "compiled": 1, "cached": 2}
    assert len(network.runs()) == 2


@pytest.mark.parametrize("times", [1, 3])
def test_a_failure_whose_owner_died_before_it_gave_its_lease_back_fails_no_later_run(times: int) -> None:
    """With stand-ins for the compilers, for which no time passes."""
    filesystem = DictFilesystem({})
    kernels = {"one": b"int run(int x) { return x; }"}
    store = Store(filesystem)
    store.prepare_for_writing()
    for _ in range(times):
        report, workers = run(lambda: store, kernels, failing={"one"})
        assert [outcome.state for outcome in report.graphs] == ["failed"]
        assert workers.compiled == ["one"], "it has tried for itself"
        key = report.graphs[0].key
        failure = store.read_failure(key)
        assert failure is not None
        lease = LeaseRecord(key, failure.lease, "a process that died", "nonce", STAND_IN_LEASE_SECONDS)
        assert filesystem.create(layout.by_digest(layout.LEASES, key), seal("lease", lease))
    report, workers = run(lambda: store, kernels)
    assert workers.compiled == ["one"]
    assert report.manifest is not None
    assert STAND_IN_LEASE_SECONDS <= workers.waited < STAND_IN_LEASE_SECONDS + 4


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.xdist_group("s3")
def test_16_processes_compile_each_kernel_graph_once_on_s3(tmp_path: Path, s3_endpoint: str) -> None:
    from tests.storage.s3_servers import BUCKET, options_for

    network = CcNetwork(tmp_path / "network", KERNELS, before=TAKES_A_WHILE)
    store, options = f"s3://{BUCKET}/cold", options_for(s3_endpoint)
    first, *others = found_by_many(16, network, store, options)
    assert all(other == first for other in others)
    assert network.runs() == sorted(KERNELS)
    # What they made is there for the command line.
    given = [item for name, value in options.items() for item in ("--storage-option", f"{name}={value}")]
    (document,) = documents([start(network, store, "--json", *given)])
    assert set(states(document).values()) == {"cached"}
    assert (document["committed"], document["manifest"]) == (True, first["manifest"])
