"""Whatever befalls a run at whichever operation on its store: nothing is lost, and the next run goes on."""

from collections import Counter
from collections.abc import Callable, Set
from pathlib import Path

import pytest

import graphkiln
from graphkiln.storage import layout
from graphkiln.storage.errors import DamagedStoreError, NotCommittedError, StoreUnavailableError
from graphkiln.storage.local import TEMPORARY_PREFIX
from graphkiln.storage.pins import SWEEP_SECONDS
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from graphkiln.tasks.network import CompiledNetwork
from graphkiln.tasks.session import Report
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, call
from tests.flows.cc_networks import outputs_of as loaded_outputs
from tests.flows.crash_points import KERNELS, SCENARIOS, Disk, Objects, ObjectStore, Place, Scenario, load, not_usable
from tests.flows.stand_in_workers import LEASE_SECONDS, outputs_of, run
from tests.storage.faults import HALF_READ, HALF_WRITTEN, DictFilesystem, FaultPoint, KilledError
from tests.storage.faulty_fsspec import URL, Medium

# A run looks at the lease that it waits for at growing intervals.
LONGEST_LOOK_SECONDS = 2.0


pytestmark = pytest.mark.usefixtures("without_warnings")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_operation_on_an_object_store(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    _try_every_point(lambda objects, _: ObjectStore(objects), scenario, capsys)


@pytest.mark.parametrize("scenario", ["a first run", "a run after a change", "a mending of documents"])
def test_every_system_call_on_a_disk(scenario: str, fast_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _try_every_point(lambda objects, name: Disk(objects, fast_folder / name), scenario, capsys)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads are killed as well
def test_some_operations_of_runs_with_the_real_compiler(
    tmp_path: Path, without_prefect: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {"negate": "int run(int a) { return -a; }", "scale": "int run(int a) { return 3 * a; }"}
    network = CcNetwork(tmp_path / "network", sources)
    network.limit("lease_seconds = 1")
    points = {
        ("create", "blobs/"): "killed before",
        ("create", "leases/"): "reply lost",
        ("create", "actions/"): "killed after",
        ("create", "manifests/"): "throttled",
        ("write", "refs/"): "killed after",
    }
    for at, fault in points.items():
        medium, point = Medium(), FaultPoint(at, fault)
        with pytest.raises((KilledError, StoreUnavailableError)):
            _ensure(network, medium, point)
        assert point.struck
        store = Store(DictFilesystem(medium.objects()))
        assert not verify_store(store).damaged
        if at[1] == "refs/":
            assert sorted(loaded_outputs(_load_as_a_trainer(medium))) == sorted(sources)
        else:
            with pytest.raises(NotCommittedError):
                _load_as_a_trainer(medium)
        missing = len(sources) - len(list(store.names(layout.ACTIONS)))
        network.take_runs()
        _ensure(network, medium, FaultPoint())
        assert len(network.take_runs()) == missing
        network_of = _load_as_a_trainer(medium)
        assert [call(network_of, name, tmp_path / "-".join(at).rstrip("/"), 7) for name in sorted(sources)] == [-7, 21]
    with capsys.disabled():
        print(f"\nfirst runs with the real compiler on an object store: {len(points)} points")


def _ensure(network: CcNetwork, medium: Medium, point: FaultPoint) -> None:
    graphkiln.ensure(network.spec, store=URL, storage_options={"medium": medium, "point": point}, jobs=1)


def _load_as_a_trainer(medium: Medium) -> CompiledNetwork:
    return graphkiln.load(NAME, target=TARGET, store=URL, storage_options={"medium": medium, "point": FaultPoint()})


def _try_every_point(make: Callable[[Objects, str], Place], scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = SCENARIOS[scenario]()
    undisturbed = FaultPoint()
    place = make(made.objects, "undisturbed")
    with place.faulty(undisturbed) as opened:
        made.act(opened)
    counts: Counter[str] = Counter()
    for at, (operation, path) in enumerate(undisturbed.operations):
        for fault in place.faults_of(operation):
            try:
                _try(make(made.objects, f"{at}-{fault}"), made, FaultPoint(at, fault), fault)
            except Exception as error:
                error.add_note(f"{fault} at operation {at}: {operation} {path}")
                raise
            counts[fault] += 1
    with capsys.disabled():
        told = ", ".join(f"{count} {fault}" for fault, count in counts.items())
        print(
            f"\n{scenario} on {place.name}: {counts.total()} points at {len(undisturbed.operations)} operations: {told}"
        )


def _try(place: Place, scenario: Scenario, point: FaultPoint, fault: str) -> None:
    report = _act(place, scenario, point, fault)
    spoilt = {point.struck} if fault in HALF_WRITTEN else set()
    _nothing_is_lost(place.store(), scenario, report, scenario.damaged | spoilt)
    if fault == HALF_READ and not scenario.damaged:
        assert not list(place.store().names(layout.QUARANTINE)), "what was whole has been set aside"
    _next_run_goes_on(place)


def _act(place: Place, scenario: Scenario, point: FaultPoint, fault: str) -> Report | None:
    try:
        with place.faulty(point) as opened:
            report = scenario.act(opened)
    except KilledError:
        assert "killed" in fault
        return None
    except StoreUnavailableError as error:
        assert fault not in ("killed before", "killed after", "repeated")
        # A lease of which a half is read is not known any more.
        assert error.reason in ("disk-full" if fault == "ENOSPC" else "store-io", "collecting" * (fault == HALF_READ))
        return None
    except DamagedStoreError:
        assert fault == HALF_READ
        return None
    assert "killed" not in fault
    return report


def _nothing_is_lost(store: Store, scenario: Scenario, report: Report | None, harmed: Set[str]) -> None:
    problems = verify_store(store).problems
    assert {problem.path for problem in problems if problem.severity == "damage"} <= harmed
    before = None if scenario.committed is None else outputs_of(scenario.committed)
    try:
        loaded = load(store)
    except DamagedStoreError as error:
        assert error.path in harmed
        loaded = before
    if report is not None and report.manifest is not None:
        assert loaded == outputs_of(KERNELS)
    elif loaded is None:
        assert before is None or any(path.startswith(layout.REFS) for path in harmed)
    else:
        assert loaded in (before, outputs_of(KERNELS))


def _next_run_goes_on(place: Place) -> None:
    missing = not_usable(place.store())
    leased = [path for path in place.store().names(layout.LEASES) if not _is_temporary(path)]
    sweeping = layout.SWEEP in list(place.store().names(""))
    with place.faulty(FaultPoint()) as opened:
        report, workers = run(opened, KERNELS)
    assert report.manifest is not None
    assert sorted(workers.compiled) == sorted(missing)
    # A dead run's lease is taken over without a hand, and nobody waits without one.
    # So is a collector that is dead.
    most = len(leased) * (LEASE_SECONDS + 2 * LONGEST_LOOK_SECONDS) + sweeping * (SWEEP_SECONDS + 2)
    assert workers.waited <= most
    store = place.store()
    assert load(store) == outputs_of(KERNELS)
    damaged = {problem.path for problem in verify_store(store).problems if problem.severity == "damage"}
    assert not [path for path in damaged if _is_named(store, path)]


def _is_named(store: Store, path: str) -> bool:
    """Tell whether an object is named by another one, or is one that is found by its name."""
    if not path.startswith(layout.BLOBS):
        return True
    name = path.rpartition("/")[2].encode()
    return any(
        name in store.read_raw(other)
        for other in store.names("")
        if not other.startswith((layout.QUARANTINE, layout.PINS))
    )


def _is_temporary(path: str) -> bool:
    return path.rpartition("/")[2].startswith(TEMPORARY_PREFIX)
