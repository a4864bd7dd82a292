"""SIGKILL at random moments: nothing runs on, the store is whole or as it was before, and the next run goes on."""

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

import graphkiln
from graphkiln.storage.errors import NotCommittedError
from graphkiln.storage.store import open_store
from graphkiln.storage.verify import verify_store
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, outputs_of
from tests.flows.killed_runs import (
    AFTER,
    STAGES,
    Killer,
    Run,
    committed_in,
    not_compiled,
    plan_in,
    stage_durations,
    stage_of,
    survivors,
)
from tests.flows.prefect_api import Server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_prefect")]

SEED = 20_240_229
KERNELS = 6
CHANGED = 3
DIRECT_KILLS, FLOW_KILLS = 40, 10
LEAST_A_STAGE = {DIRECT_KILLS: 5, FLOW_KILLS: 2}
# Stages are hit by chance: what misses its stage is checked as well, but may not count.
TRIES_A_KILL = 3
ENDED = "ended by itself"

Outputs = dict[str, dict[str, bytes]]


def _kernels(*, former: bool) -> dict[str, str]:
    return {
        f"kernel{number}": f"int run(int a) {{ return a + {number + 100 * (former and number < CHANGED)}; }}"
        for number in range(KERNELS)
    }


class Scene:
    """A network, a store in which it was committed before some of its kernels changed, and what comes out of it."""

    def __init__(self, folder: Path) -> None:
        slow = "sleep 0.02"
        self.network = CcNetwork(folder / "network", _kernels(former=False), before=slow)
        # A run that follows a kill waits for the dead run's leases: the least that a spec may ask for.
        self.network.limit("lease_seconds = 1")
        former = CcNetwork(folder / "former", _kernels(former=True), before=slow)
        # Both have one compiler, as its path is an option of the target.
        former.spec.write_text(self.network.spec.read_text())
        self.used_store = folder / "used-store"
        self.former_outputs = outputs_of(graphkiln.ensure(former.spec, store=str(self.used_store)))
        compiled = graphkiln.ensure(self.network.spec, store=str(folder / "reference"))
        self.plan = compiled.manifest.plan
        self.outputs = outputs_of(compiled)
        assert self.outputs != self.former_outputs
        self.scratch = folder / "scratch"
        self.scratch.mkdir()

    def run(self, store: Path, environment: Mapping[str, str], *options: str) -> Run:
        arguments = ["compile", str(self.network.spec), "--store", str(store), "--jobs", "2", *options]
        return Run(arguments, self.scratch, environment)

    def scratch_folders(self) -> list[Path]:
        return list(self.scratch.glob("graphkiln-children-*"))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "scene")


def test_killed_runs_without_prefect(scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"PREFECT_HOME": str(tmp_path / "prefect")}
    counts = _kill_often(scene, tmp_path, environment, ["--no-prefect"], DIRECT_KILLS)
    with capsys.disabled():
        _print_table("without Prefect", counts)


@pytest.mark.prefect
@pytest.mark.xdist_group("prefect")
def test_killed_flows(scene: Scene, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_API_URL": server.url}
    counts = _kill_often(scene, tmp_path, environment, [], FLOW_KILLS)
    with capsys.disabled():
        _print_table("flows on one server", counts)


def test_a_killed_run_takes_with_it_compilers_that_would_never_end(tmp_path: Path, store_url: str) -> None:
    kernels = {"one": "int run(int a) { return 1; }", "two": "int run(int a) { return 2; }"}
    network = CcNetwork(tmp_path / "network", kernels, before="sleep 600")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = ["compile", str(network.spec), "--store", store_url, "--jobs", "2", "--no-prefect"]
    run = Run(arguments, scratch, {"PREFECT_HOME": str(tmp_path / "prefect")})
    assert run.read_until(lambda _: network.runs() == sorted(kernels)), run.text
    assert run.kill()
    assert not survivors(scratch)


def _kill_often(
    scene: Scene, folder: Path, environment: Mapping[str, str], options: list[str], kills: int
) -> Counter[str]:
    killer = Killer(stage_durations(scene.run(folder / "measured", environment, *options), KERNELS), KERNELS, SEED)
    counts: Counter[str] = Counter()
    for number in range(kills * TRIES_A_KILL):
        wanted = min(STAGES, key=lambda stage: counts[stage])
        folder_now = folder / f"store-{number}"
        used = number % 4 >= 2
        if used:
            shutil.copytree(scene.used_store, folder_now)
        store = open_store(str(folder_now))
        before = plan_in(store), committed_in(store)
        killed = killer.kill(scene.run(folder_now, environment, *options), wanted)
        assert not survivors(scene.scratch)
        stage = stage_of(store, *before)
        killer.learn(wanted, stage)
        counts[stage if killed else ENDED] += 1
        _store_is_whole_or_as_before(scene, folder_now, used=used)
        if number % 2 and stage in STAGES:
            _next_run_goes_on(scene, folder_now)
        shutil.rmtree(folder_now)
        if sum(counts[stage] for stage in STAGES) == kills:
            break
    else:
        pytest.fail(f"too few runs were killed in a stage: {dict(counts)}")
    assert min(counts[stage] for stage in STAGES) >= LEAST_A_STAGE[kills]
    return counts


def _store_is_whole_or_as_before(scene: Scene, folder: Path, *, used: bool) -> None:
    store = open_store(str(folder))
    assert not verify_store(store).damaged
    expected = [scene.outputs]
    if used:
        expected.append(scene.former_outputs)
    try:
        loaded = outputs_of(graphkiln.load(NAME, target=TARGET, store=str(folder)))
    except NotCommittedError:
        assert not used
        assert committed_in(store) is None
    else:
        assert loaded in expected


def _next_run_goes_on(scene: Scene, folder: Path) -> None:
    missing = [graph.name for graph in not_compiled(open_store(str(folder)), scene.plan)]
    scene.network.take_runs()
    run = scene.run(folder, {}, "--no-prefect")
    assert run.finish() == 0, run.text
    assert scene.network.take_runs() == missing
    assert outputs_of(graphkiln.load(NAME, target=TARGET, store=str(folder))) == scene.outputs
    assert not verify_store(open_store(str(folder))).damaged
    assert not scene.scratch_folders()


def _print_table(title: str, counts: Counter[str]) -> None:
    print(f"\nkilled {title}, by the stage that the store shows:")
    for stage in (*STAGES, AFTER, ENDED):
        print(f"  {stage:16} {counts[stage]:3}")
