"""What the commit stage and the readers refuse: damage between compile and commit, and records that are not theirs."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import graphkiln
from graphkiln.storage import layout
from graphkiln.storage.documents import seal
from graphkiln.storage.errors import CompileFailedError, DamagedStoreError, GraphKilnError, NotCommittedError
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.records import Plan, RefRecord
from graphkiln.storage.store import Store, open_store
from graphkiln.storage.verify import verify_store
from graphkiln.tasks.commit import commit_manifest
from graphkiln.tasks.network import CompiledNetwork
from graphkiln.tasks.outcome import GraphOutcome
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, outputs_of

pytestmark = pytest.mark.usefixtures("without_prefect")

KERNELS = {
    "double": "int run(int a) { return 2 * a; }",
    "triple": "int run(int a) { return 3 * a; }",
}

Damage = Callable[[Plan, Store], str]


@pytest.fixture
def network(tmp_path: Path) -> CcNetwork:
    return CcNetwork(tmp_path / "network", KERNELS)


def _artifact(plan: Plan, store: Store) -> str:
    result = store.read_action(plan.graphs[1].key)
    assert result is not None
    (output,) = result.outputs.values()
    return layout.by_digest(layout.BLOBS, output.digest)


def _action(plan: Plan, store: Store) -> str:
    return layout.by_digest(layout.ACTIONS, plan.graphs[1].key)


def _payload(plan: Plan, store: Store) -> str:
    return layout.by_digest(layout.BLOBS, plan.graphs[1].payload.digest)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x01
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, _flip], ids=["deleted", "flipped"])
@pytest.mark.parametrize(("find", "runs"), [(_artifact, 1), (_action, 1), (_payload, 0)])
def test_damage_between_compile_and_commit_commits_nothing(
    network: CcNetwork,
    store_url: str,
    find: Damage,
    runs: int,
    damage: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged: list[str] = []

    def damage_first(plan: Plan, outcomes: Mapping[str, GraphOutcome], store: Store, *more: Any) -> RefRecord:
        damaged.append(find(plan, store))
        damage(Path(store_url) / damaged[0])
        return commit_manifest(plan, outcomes, store, *more)

    with monkeypatch.context() as patch:
        patch.setattr("graphkiln.tasks.session.commit_manifest", damage_first)
        with pytest.raises((CompileFailedError, DamagedStoreError)) as caught:
            graphkiln.ensure(network.spec, store=store_url)
    assert "triple" in str(caught.value)
    _nothing_is_committed(store_url)
    assert network.take_runs() == sorted(KERNELS)

    graphkiln.ensure(network.spec, store=store_url)
    assert network.take_runs() == ["triple"] * runs
    _everything_is_right(store_url)


@pytest.mark.parametrize("folder", [layout.BLOBS, layout.ACTIONS, layout.MANIFESTS])
def test_a_disk_that_does_not_keep_what_was_written_commits_nothing(
    network: CcNetwork, store_url: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = LocalFilesystem.create
    spoilt: list[str] = []

    def create_and_spoil(filesystem: LocalFilesystem, path: str, data: bytes) -> bool:
        created = create(filesystem, path, data)
        if created and path.startswith(f"{folder}/") and not spoilt:
            spoilt.append(path)
            _flip(Path(store_url) / path)
        return created

    with monkeypatch.context() as patch:
        patch.setattr(LocalFilesystem, "create", create_and_spoil)
        with pytest.raises(GraphKilnError) as caught:
            graphkiln.ensure(network.spec, store=store_url)
    assert caught.value.exit_code in (CompileFailedError.exit_code, DamagedStoreError.exit_code)
    _nothing_is_committed(store_url)

    network.take_runs()
    graphkiln.ensure(network.spec, store=store_url)
    assert len(network.take_runs()) == (0 if folder == layout.MANIFESTS else 1)
    _everything_is_right(store_url)


def test_a_ref_of_another_variant_is_refused(network: CcNetwork, store_url: str) -> None:
    one, other = _two_variants(network, store_url)
    shutil.copy(Path(store_url) / _ref_path(other), Path(store_url) / _ref_path(one))
    _refused_and_mended(network, store_url, one)


def test_a_ref_of_another_network_is_refused(network: CcNetwork, store_url: str, tmp_path: Path) -> None:
    foreign = CcNetwork(tmp_path / "foreign", {"double": "int run(int a) { return 5 * a; }"}, name="foreign")
    other = graphkiln.ensure(foreign.spec, store=store_url)
    one = graphkiln.ensure(network.spec, store=store_url)
    network.take_runs()
    shutil.copy(Path(store_url) / _ref_path(other), Path(store_url) / _ref_path(one))
    _refused_and_mended(network, store_url, one)


def test_a_ref_that_names_the_manifest_of_another_variant_is_refused(network: CcNetwork, store_url: str) -> None:
    one, other = _two_variants(network, store_url)
    store = open_store(store_url)
    foreign = store.read_ref(NAME, TARGET, other.variant)
    assert foreign is not None
    _forge_ref(store_url, msgspec.structs.replace(foreign, variant=one.variant), one)
    _refused_and_mended(network, store_url, one)


def test_a_manifest_of_another_variant_in_the_place_of_one_is_refused(network: CcNetwork, store_url: str) -> None:
    one, other = _two_variants(network, store_url)
    store = open_store(store_url)
    paths = []
    for compiled in (one, other):
        ref = store.read_ref(NAME, TARGET, compiled.variant)
        assert ref is not None
        paths.append(Path(store_url) / layout.by_digest(layout.MANIFESTS, ref.manifest))
    shutil.copy(paths[1], paths[0])
    _refused_and_mended(network, store_url, one)


def test_an_action_result_of_another_kernel_graph_is_refused(network: CcNetwork, store_url: str) -> None:
    compiled = graphkiln.ensure(network.spec, store=store_url)
    network.take_runs()
    double, triple = (
        Path(store_url) / layout.by_digest(layout.ACTIONS, graph.key) for graph in compiled.manifest.plan.graphs
    )
    shutil.copy(double, triple)
    assert verify_store(open_store(store_url)).damaged
    graphkiln.ensure(network.spec, store=store_url)
    assert network.take_runs() == ["triple"]
    _everything_is_right(store_url)


def _two_variants(network: CcNetwork, store_url: str) -> tuple[CompiledNetwork, CompiledNetwork]:
    # Ranks are a parameter of the frontend `file`, and so a variant of their own.
    other = graphkiln.ensure(network.spec, store=store_url, parameters={"ranks": "4-7"})
    one = graphkiln.ensure(network.spec, store=store_url)
    assert one.variant != other.variant
    network.take_runs()
    return one, other


def _ref_path(compiled: CompiledNetwork) -> str:
    return layout.by_variant(layout.REFS, compiled.name, compiled.target, compiled.variant)


def _forge_ref(store_url: str, ref: RefRecord, compiled: CompiledNetwork) -> None:
    (Path(store_url) / _ref_path(compiled)).write_bytes(seal("ref", ref))


def _refused_and_mended(network: CcNetwork, store_url: str, compiled: CompiledNetwork) -> None:
    problems = verify_store(open_store(store_url)).problems
    assert [problem for problem in problems if problem.severity == "damage"]
    with pytest.raises(DamagedStoreError) as caught:
        graphkiln.load(NAME, target=TARGET, store=store_url)
    assert caught.value.path in [problem.path for problem in problems]
    mended = graphkiln.ensure(network.spec, store=store_url)
    assert mended.manifest == compiled.manifest
    assert not network.take_runs()
    _everything_is_right(store_url)


def _nothing_is_committed(store_url: str) -> None:
    store = open_store(store_url)
    assert not list(store.names(layout.REFS))
    with pytest.raises(NotCommittedError):
        graphkiln.load(NAME, target=TARGET, store=store_url)


def _everything_is_right(store_url: str) -> None:
    assert not verify_store(open_store(store_url)).damaged
    outputs = outputs_of(graphkiln.load(NAME, target=TARGET, store=store_url))
    assert sorted(outputs) == sorted(KERNELS)
