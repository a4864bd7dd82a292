"""Which runs write to the catalogue, and what."""

import logging
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import graphkiln
from graphkiln.flows.direct import run_direct
from graphkiln.storage.blobs import artifact_digest
from graphkiln.storage.catalog import part_paths
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import CompileFailedError
from graphkiln.storage.leases import LeaseRecord, Leases
from graphkiln.storage.records import PlannedGraph
from graphkiln.storage.store import Store, open_store
from graphkiln.tasks.checks import parse_ranks
from graphkiln.tasks.outcome import GraphOutcome
from graphkiln.tasks.session import Report, open_session
from graphkiln.tasks.workers import Workers
from tests.flows.cc_networks import NAME, TARGET, CcNetwork
from tests.storage.catalogs import rows_in

pytestmark = pytest.mark.usefixtures("without_prefect")

KERNELS = {
    "double": "int run(int a) { return 2 * a; }",
    "triple": "int run(int a) { return 3 * a; }",
}


@pytest.fixture
def network(tmp_path: Path) -> CcNetwork:
    return CcNetwork(tmp_path / "network", KERNELS)


def compile_network(network: CcNetwork, store: str, ranks: str | None = None) -> Report:
    """Do what the command `compile` does without Prefect."""
    with Workers(2) as workers:
        return run_direct(open_session(network.spec, workers, store=store, ranks=parse_ranks(ranks)))


def parts_in(store: str) -> int:
    return len(part_paths(open_store(store)))


def newest(store: str, number: int = 2) -> list[dict[str, Any]]:
    """The last rows of a catalogue."""
    return rows_in(open_store(store))[-number:]


def test_each_compile_writes_a_row_for_each_kernel_graph(network: CcNetwork, store_url: str) -> None:
    first, second = compile_network(network, store_url), compile_network(network, store_url)
    assert parts_in(store_url) == 2
    store = open_store(store_url)
    plan = store.read_manifest(first.manifest).plan  # type: ignore[arg-type]
    rows = rows_in(store)
    assert [row["kernel_graph"] for row in rows] == ["double", "triple"] * 2
    assert [row["outcome"] for row in rows] == ["compiled"] * 2 + ["cached"] * 2
    assert rows[0]["run"] == rows[1]["run"] != rows[2]["run"] == rows[3]["run"]
    for row, graph in zip(rows, [*plan.graphs, *plan.graphs], strict=True):
        result = store.read_action(graph.key)
        assert result is not None
        assert row["network"] == NAME
        assert row["target"] == TARGET
        assert row["variant"] == bytes.fromhex(first.variant)
        assert (row["ranks"], row["rank_count"]) == ("0-3", 4)
        assert row["action_key"] == bytes.fromhex(graph.key)
        assert row["artifact"] == bytes.fromhex(artifact_digest(result.outputs))
        assert row["bytes"] == result.outputs["kernel.so"].size > 1000
        assert row["stored_bytes"] == result.outputs["kernel.so"].stored_size < row["bytes"]
        assert row["compile_seconds"] == result.stats.seconds > 0
        assert row["peak_memory_bytes"] == result.stats.peak_memory_bytes > 0
        assert row["host"] == platform.node()
        assert row["compiled_at"] == result.stats.finished_at <= row["time"]
    assert second.manifest == first.manifest


def test_a_failed_run_writes_what_became_of_each_kernel_graph(network: CcNetwork, store_url: str) -> None:
    network.write_kernel("triple", "int run(int a) { return 3 *; }")
    assert compile_network(network, store_url).manifest is None
    double, triple = newest(store_url)
    assert (double["outcome"], triple["outcome"]) == ("compiled", "failed")
    failure = open_store(store_url).read_failure(Digest(triple["action_key"].hex()))
    assert failure is not None
    assert triple["compile_seconds"] == failure.stats.seconds > 0
    assert triple["compiled_at"] == failure.stats.finished_at
    assert triple["host"] == platform.node()
    assert triple["artifact"] is triple["bytes"] is triple["stored_bytes"] is None
    with pytest.raises(CompileFailedError):
        graphkiln.ensure(network.spec, store=store_url)
    assert [row["outcome"] for row in newest(store_url)] == ["cached", "failed"]


def test_kernel_graphs_that_share_an_action_have_a_row_each(tmp_path: Path, store_url: str) -> None:
    network = CcNetwork(tmp_path / "network", KERNELS)
    source = network.folder / "kernels" / "double.c"
    (network.folder / "kernels" / "twin.c").write_text(source.read_text())
    compile_network(network, store_url)
    assert network.take_runs() == ["double", "triple"]
    double, _, twin = newest(store_url, 3)
    assert (double["kernel_graph"], twin["kernel_graph"]) == ("double", "twin")
    assert double["action_key"] == twin["action_key"]
    assert double["compiled_at"] == twin["compiled_at"]


def test_a_run_for_some_ranks_writes_what_they_need(network: CcNetwork, store_url: str) -> None:
    network.spec.write_text(network.spec.read_text().replace('"0-3"', '{ double = "0-1", triple = "2-3" }'))
    assert compile_network(network, store_url, "3").manifest is None
    (row,) = rows_in(open_store(store_url))
    assert (row["kernel_graph"], row["ranks"], row["rank_count"]) == ("triple", "2-3", 2)


def test_ensure_writes_what_it_did_and_nothing_if_all_was_there(network: CcNetwork, store_url: str) -> None:
    graphkiln.ensure(network.spec, store=store_url)
    assert parts_in(store_url) == 1
    graphkiln.ensure(network.spec, store=store_url)
    assert parts_in(store_url) == 1
    network.write_kernel("double", "int run(int a) { return a + a; }")
    graphkiln.ensure(network.spec, store=store_url)
    assert [row["outcome"] for row in newest(store_url)] == ["compiled", "cached"]


def test_ensure_writes_its_rows_if_it_commits_what_others_have_compiled(
    network: CcNetwork, store_url: str, tmp_path: Path
) -> None:
    other = CcNetwork(tmp_path / "other", KERNELS, name="other")
    other.spec.write_text(other.spec.read_text().replace(str(other.compiler), str(network.compiler)))
    graphkiln.ensure(other.spec, store=store_url)
    graphkiln.ensure(network.spec, store=store_url)
    assert network.runs() == ["double", "triple"]
    assert [(row["network"], row["outcome"]) for row in newest(store_url)] == [(NAME, "cached")] * 2
    # The ranks are a parameter of the frontend: another variant, with nothing to compile.
    graphkiln.ensure(network.spec, store=store_url, parameters={"ranks": "0-7"})
    assert [row["rank_count"] for row in newest(store_url)] == [8, 8]
    assert parts_in(store_url) == 3


class WhileWaiting:
    """Ends the wait of a run: the result comes, and the lease goes."""

    def __init__(self, store: Store, leases: Leases, graph: PlannedGraph) -> None:
        result = store.read_action(graph.key)
        assert result is not None
        self._store, self._leases, self._result = store, leases, result
        lease = leases.take(graph.key)
        assert isinstance(lease, LeaseRecord)
        self._lease = lease
        store.drop_action(result)

    def planned(self, graphs: list[PlannedGraph]) -> None:
        pass

    def compiling(self, graph: PlannedGraph) -> None:
        pass

    def waiting(self, graph: PlannedGraph, owner: str) -> None:
        self._store.write_action(self._result)
        self._leases.release(self._lease)

    def finished(self, outcome: GraphOutcome) -> None:
        pass


def test_a_trainer_that_waited_for_another_run_writes_its_rows(network: CcNetwork, store_url: str) -> None:
    compiled = graphkiln.ensure(network.spec, store=store_url)
    store = open_store(store_url)
    with Leases(store) as leases, Workers(2) as workers:
        progress = WhileWaiting(store, leases, compiled.manifest.plan.graphs[0])
        run_direct(open_session(network.spec, workers, store=store_url, progress=progress, record_hits=False))
    assert network.runs() == ["double", "triple"]
    assert parts_in(store_url) == 2
    assert [row["outcome"] for row in newest(store_url)] == ["cached", "cached"]


def test_a_warm_start_does_not_import_pyarrow(network: CcNetwork, store_url: str) -> None:
    graphkiln.ensure(network.spec, store=store_url)
    script = (
        "import sys, graphkiln\n"
        f"assert graphkiln.ensure({str(network.spec)!r}, store={store_url!r}).load('double').outputs\n"
        "print('pyarrow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False"]


def test_a_catalogue_that_cannot_be_written_costs_one_warning(
    network: CcNetwork, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    Path(store_url).mkdir()
    (Path(store_url) / "catalog").write_text("no folder")
    with caplog.at_level(logging.WARNING, logger="graphkiln"):
        made = graphkiln.ensure(network.spec, store=store_url)
    assert made.graphs() == ["double", "triple"]
    (record,) = [record for record in caplog.records if record.name == "graphkiln"]
    assert "could not be written to the catalogue, and reports will lack it" in record.getMessage()
    assert graphkiln.load(NAME, target=TARGET, store=store_url).variant == made.variant
