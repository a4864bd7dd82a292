"""Every stored object, damaged in every way: nobody ever gets wrong bytes, and the next `ensure` mends it."""

import itertools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import graphkiln
from graphkiln.storage import layout
from graphkiln.storage.errors import DamagedStoreError, NotCommittedError
from graphkiln.storage.store import open_store
from graphkiln.storage.verify import Verification, verify_store
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, call, outputs_of
from tests.flows.damaged_stores import DAMAGES, EXPECTED_OF_7, KERNELS, Scene

pytestmark = pytest.mark.usefixtures("without_prefect")

TakeWarnings = Callable[[], list[str]]

# How often a compiler runs to mend the loss of one object of a kind.
RUNS = {
    "store format": 0,
    "ref": 0,
    "manifest": 0,
    "plan": 0,
    "plan before": 0,
    "payload": 0,
    "action result": 1,
    "artifact": 1,
    "log": 0,
}
# Those kinds of which the network before its change had objects that the network of now does not need.
FORMER_KINDS = ["action result", "artifact", "manifest", "payload"]
FOLDERS = {layout.ACTIONS: 3, layout.BLOBS: 3, layout.MANIFESTS: 0, layout.PLANS: 0, layout.REFS: 0}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))
        return Scene(folder)


@pytest.fixture
def take_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[TakeWarnings]:
    """Returns the warnings since it was last called."""

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "graphkiln"]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING, logger="graphkiln"):
        yield take


def test_the_scene_has_every_object_of_the_store(scene: Scene) -> None:
    kinds = [*scene.objects.values(), *scene.former_objects.values()]
    found = open_store(str(scene.store)).names("")
    assert sorted(itertools.chain.from_iterable(kinds)) == [
        path for path in found if not path.startswith((layout.RUN_PINS, layout.CATALOG))
    ]
    assert scene.objects.keys() == RUNS.keys()
    assert sorted(scene.former_objects) == FORMER_KINDS
    assert {kind: len(paths) for kind, paths in scene.objects.items() if len(paths) != 1} == {
        "payload": 3,
        "action result": 3,
        "artifact": 3,
    }
    assert not verify_store(open_store(str(scene.store))).problems


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", RUNS)
def test_damage_is_reported_harmless_and_mended(
    scene: Scene, kind: str, damage: str, tmp_path: Path, take_warnings: TakeWarnings
) -> None:
    for number, path in enumerate(scene.objects[kind]):
        store = scene.copy(tmp_path / f"store-{number}")
        DAMAGES[damage](store / path)

        found = _verify_twice(store)
        # Whether a ref was lost or has not been written yet cannot be told apart.
        expected = "leftover" if (kind, damage) == ("ref", "deleted") else "damage"
        assert [problem.severity for problem in found.problems if problem.path == path] == [expected]
        assert found.damaged == (expected == "damage")

        _load_right_or_not_at_all(scene, store)

        take_warnings()
        _ensure_is_right(scene, scene.network, store, tmp_path / f"loaded-{number}")
        assert any(_tells_of(warning, path, damage) for warning in take_warnings())
        assert len(scene.network.take_runs()) == RUNS[kind]
        _is_mended(scene, store)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", FORMER_KINDS)
def test_damage_to_what_nobody_needs_now_is_reported_and_mended_when_it_is_needed(
    scene: Scene, kind: str, damage: str, tmp_path: Path, take_warnings: TakeWarnings
) -> None:
    (path,) = scene.former_objects[kind]
    store = scene.copy(tmp_path / "store")
    DAMAGES[damage](store / path)
    found = _verify_twice(store)
    if damage == "deleted" and kind != "artifact":
        assert not found.problems  # nothing names it any more, but the action result its artifact
    else:
        assert path in [problem.path for problem in found.problems if problem.severity == "damage"]

    take_warnings()
    _ensure_is_right(scene, scene.network, store, tmp_path / "loaded")
    assert not take_warnings()
    assert not scene.network.take_runs()

    network = graphkiln.ensure(scene.former.spec, store=str(store))
    assert call(network, "shift", tmp_path / "former", 7) == 17
    assert len(scene.network.take_runs()) == (1 if kind in ("action result", "artifact") else 0)
    assert damage == "deleted" or any(_tells_of(warning, path, damage) for warning in take_warnings())
    assert not verify_store(open_store(str(store))).damaged


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(RUNS, 2)))
def test_two_damaged_at_once(scene: Scene, first: str, second: str, tmp_path: Path) -> None:
    store = scene.copy(tmp_path / "store")
    # Of two that belong to kernels, they belong to different ones.
    paths = scene.objects[first][0], scene.objects[second][-1]
    DAMAGES["deleted"](store / paths[0])
    DAMAGES["middle byte flipped"](store / paths[1])
    assert {problem.path for problem in _verify_twice(store).problems} >= {paths[1]}
    _load_right_or_not_at_all(scene, store)
    _ensure_is_right(scene, scene.network, store, tmp_path / "loaded")
    assert len(scene.network.take_runs()) == RUNS[first] + RUNS[second]
    if (first, second) == ("plan", "plan before"):
        # The lost plan was the only one to name it.
        assert [problem.path for problem in verify_store(open_store(str(store))).problems] == [paths[1]]
    else:
        _is_mended(scene, store)


@pytest.mark.parametrize(("folder", "runs"), list(FOLDERS.items()))
def test_a_whole_folder_deleted(
    scene: Scene, folder: str, runs: int, tmp_path: Path, take_warnings: TakeWarnings
) -> None:
    store = scene.copy(tmp_path / "store")
    shutil.rmtree(store / folder)
    assert _verify_twice(store).problems
    _load_right_or_not_at_all(scene, store)
    take_warnings()
    _ensure_is_right(scene, scene.network, store, tmp_path / "loaded")
    assert take_warnings()
    assert len(scene.network.take_runs()) == runs
    assert not [
        problem
        for problem in verify_store(open_store(str(store))).problems
        # What only the former network needs is made again only if that is compiled.
        if problem.severity == "damage" and problem.path not in itertools.chain(*scene.former_objects.values())
    ]


def test_all_but_the_format_file_deleted(scene: Scene, tmp_path: Path, take_warnings: TakeWarnings) -> None:
    store = scene.copy(tmp_path / "store")
    for path in store.iterdir():
        if path.name != layout.FORMAT:
            shutil.rmtree(path)
    assert not _verify_twice(store).problems
    with pytest.raises(NotCommittedError):
        graphkiln.load(NAME, target=TARGET, store=str(store))
    _ensure_is_right(scene, scene.network, store, tmp_path / "loaded")
    assert scene.network.take_runs() == sorted(KERNELS)
    _is_mended(scene, store)


def _verify_twice(store: Path) -> Verification:
    """Return what a verification finds, having made sure that it changes nothing."""
    before = _content(store)
    found = verify_store(open_store(str(store), checked=False))
    assert verify_store(open_store(str(store), checked=False)) == found
    assert _content(store) == before
    return found


def _content(store: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in store.rglob("*") if path.is_file()}


def _load_right_or_not_at_all(scene: Scene, store: Path) -> None:
    before = _content(store)
    try:
        network = graphkiln.load(NAME, target=TARGET, store=str(store))
    except (DamagedStoreError, NotCommittedError):
        pass
    else:
        for graph in network.graphs():
            try:
                outputs = network.load(graph).outputs
            except DamagedStoreError as error:
                assert graph in str(error)
            else:
                assert outputs == scene.outputs[graph]
    assert _content(store) == before


def _ensure_is_right(scene: Scene, network: CcNetwork, store: Path, folder: Path) -> None:
    compiled = graphkiln.ensure(network.spec, store=str(store))
    assert outputs_of(compiled) == scene.outputs
    assert {graph: call(compiled, graph, folder, 7) for graph in compiled.graphs()} == EXPECTED_OF_7


def _is_mended(scene: Scene, store: Path) -> None:
    assert not verify_store(open_store(str(store))).damaged
    assert outputs_of(graphkiln.load(NAME, target=TARGET, store=str(store))) == scene.outputs


def _tells_of(warning: str, path: str, damage: str) -> bool:
    why = "missing" if damage == "deleted" else "damaged"
    return path in warning and why in warning
