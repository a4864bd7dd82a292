"""Whole runs, readers, damage and crashes, on a disk, in memory and on S3 in lockstep: no reader sees a wrong byte.

The compilers are stand-ins. `tests/storage/test_state_machine.py` does the same to the objects of a store one by one.
"""

import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from graphkiln.storage import layout
from graphkiln.storage.collection import Collector
from graphkiln.storage.errors import DamagedStoreError, GraphKilnError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.local import TEMPORARY_PREFIX, LocalFilesystem
from graphkiln.storage.remote import RemoteFilesystem
from graphkiln.storage.retention import Policy
from graphkiln.storage.s3 import S3Filesystem
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.flows.crash_points import load
from tests.flows.stand_in_workers import Kernels, outputs_of, run
from tests.storage.faults import FAULTS, FaultPoint, FaultyFilesystem, KilledError
from tests.storage.faulty_fsspec import URL, Medium
from tests.storage.s3_servers import BUCKET, options_for
from tests.storage.samples import HARMS, QUICK, harm

pytestmark = pytest.mark.usefixtures("without_warnings")

VERSIONS: dict[str, Kernels] = {
    "one": {"negate": b"int run(int a) { return -a; }" * 200, "scale": b"int run(int a) { return 3 * a; }"},
    "two": {"negate": b"int run(int a) { return 0 - a; }", "scale": b"int run(int a) { return 3 * a; }"},
    "three": {"negate": b"int run(int a) { return 0 - a; }", "shift": b"int run(int a) { return a + 11; }"},
}
# What a reader may find instead.
NOTHING, DAMAGED = "nothing", "damaged"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
# When collectors are at work: all objects are old then, whatever clock their file system has.
LATER = datetime(2126, 1, 2, tzinfo=UTC)

# More than any run has.
MOST_OPERATIONS = 90

Answer = TypeVar("Answer")

versions = st.sampled_from(sorted(VERSIONS))
moments = st.integers(0, MOST_OPERATIONS)


class Lockstep(RuleBasedStateMachine):
    """Does the same to every file system, each of which is empty at first."""

    def __init__(self, make: Callable[[], Sequence[StoreFilesystem]]) -> None:
        super().__init__()
        self._make = make

    @initialize()
    def start(self) -> None:
        self.filesystems = self._make()
        # What a reader may see: what was committed last. A commit that was disturbed may have come through.
        self.committed = [NOTHING]
        # What was harmed since the last run that committed, and at all.
        self.harmed: set[str] = set()
        self.ever_harmed: set[str] = set()

    # ------------------------------------------------------------------ writers

    @rule(version=versions)
    def run(self, version: str) -> None:
        reports = self._all(lambda filesystem: _run(filesystem, version))
        assert all(manifest is not None for manifest, _ in reports)
        self.committed, self.harmed = [version], set()
        self.read()

    @rule(version=versions)
    def run_in_vain(self, version: str) -> None:
        """What was committed before stays, unless all is there already."""
        ((manifest, _), *_) = self._all(lambda filesystem: _run(filesystem, version, failing="negate"))
        if manifest is not None:
            self.committed, self.harmed = [version], set()

    @rule(version=versions, at=moments, fault=st.sampled_from(FAULTS))
    def run_disturbed(self, version: str, at: int, fault: str) -> None:
        """The next run takes the leases of a dead one over."""
        ends = self._all(lambda filesystem: _end_of(lambda: _run(filesystem, version, point=FaultPoint(at, fault))))
        self.committed.append(version)
        if ends[0] == "committed":
            self.committed, self.harmed = [version], set()
        self.read()
        self.verify()

    @rule(version=versions, other=versions, at=moments)
    def run_beside_another(self, version: str, other: str, at: int) -> None:
        """One stands still in the middle, for so long that its leases are taken over, while another runs."""

        def both(filesystem: StoreFilesystem) -> object:
            point = FaultPoint(at, meanwhile=lambda: _run(filesystem, other))
            return _end_of(lambda: _run(filesystem, version, point=point))

        assert set(self._all(both)) == {"committed"}
        self.committed, self.harmed = [version, other], set()
        self.read()

    # ------------------------------------------------------------------ readers

    @rule()
    def read(self) -> None:
        self._is_right(self._all(_read)[0], self.committed)

    @rule(version=versions, at=moments)
    def read_beside_a_run(self, version: str, at: int) -> None:
        def both(filesystem: StoreFilesystem) -> list[str]:
            seen: list[str] = []
            point = FaultPoint(at, meanwhile=lambda: seen.append(_read(filesystem)))
            _run(filesystem, version, point=point)
            return seen

        for seen in self._all(both)[0]:
            self._is_right(seen, [*self.committed, version])
        self.committed, self.harmed = [version], set()

    @rule()
    def verify(self) -> None:
        for damaged in self._all(_damaged):
            assert damaged <= self.ever_harmed

    # ------------------------------------------------------------------ damage

    @precondition(lambda self: bool(_names(self.filesystems[0])))
    @rule(data=st.data(), how=st.sampled_from(sorted(HARMS)))
    def damage(self, data: st.DataObject, how: str) -> None:
        path = data.draw(st.sampled_from(_names(self.filesystems[0])))
        if not self.filesystems[0].read(path):
            return  # nothing is left of it
        for filesystem in self.filesystems:
            harm(filesystem, path, how)
        self.harmed.add(path)
        self.ever_harmed |= {path, *_results(self.filesystems[0])}

    # ------------------------------------------------------------------ collectors

    @rule()
    def collect(self) -> None:
        """All that nobody needs goes, and what is committed stays."""
        self._all(_collect)
        self.read()

    @rule(at=moments, fault=st.sampled_from(FAULTS))
    def collect_disturbed(self, at: int, fault: str) -> None:
        """What was left of it is taken away by the next one."""
        for filesystem in self.filesystems:
            _end_of(lambda filesystem=filesystem: _collect(filesystem, FaultPoint(at, fault)))  # type: ignore[misc]
        self._all(_collect)
        self.read()

    # ------------------------------------------------------------------ what always holds

    def _is_right(self, seen: str, versions: list[str]) -> None:
        assert seen in versions or (self.harmed and seen in (NOTHING, DAMAGED))

    def _all(self, act: Callable[[StoreFilesystem], Answer]) -> list[Answer]:
        answers = [act(filesystem) for filesystem in self.filesystems]
        assert all(answer == answers[0] for answer in answers)
        names = [_names(filesystem) for filesystem in self.filesystems]
        assert all(found == names[0] for found in names)
        return answers


def _run(
    filesystem: StoreFilesystem, version: str, failing: str = "", point: FaultPoint | None = None
) -> tuple[object, list[str]]:
    def opened() -> Store:
        store = Store(filesystem if point is None else FaultyFilesystem(filesystem, point), now=lambda: NOW)
        store.prepare_for_writing()
        return store

    report, workers = run(opened, VERSIONS[version], failing)
    return report.manifest, workers.compiled


def _collect(filesystem: StoreFilesystem, point: FaultPoint | None = None) -> tuple[object, list[str]]:
    store = Store(filesystem if point is None else FaultyFilesystem(filesystem, point), now=lambda: LATER)
    waited: list[float] = []
    found = Collector(store, Policy(), sleep=waited.append, monotonic=lambda: sum(waited)).run()
    return None, [item.network for item in found.freed]


def _end_of(act: Callable[[], tuple[object, list[str]]]) -> str:
    try:
        manifest, _ = act()
    except KilledError:
        return "killed"
    except GraphKilnError as error:
        return error.reason
    return "not committed" if manifest is None else "committed"


def _read(filesystem: StoreFilesystem) -> str:
    """Return the version whose every byte a trainer reads."""
    try:
        outputs = load(Store(filesystem))
    except DamagedStoreError:
        return DAMAGED
    if outputs is None:
        return NOTHING
    return next(version for version, kernels in VERSIONS.items() if outputs_of(kernels) == outputs)


def _damaged(filesystem: StoreFilesystem) -> set[str]:
    return {problem.path for problem in verify_store(Store(filesystem)).problems if problem.severity == "damage"}


def _names(filesystem: StoreFilesystem) -> list[str]:
    """Return all objects but those whose names are random."""
    return [
        path
        for path in filesystem.names("")
        if not path.startswith((layout.QUARANTINE, layout.PINS, layout.CATALOG))
        and not path.rpartition("/")[2].startswith(TEMPORARY_PREFIX)
    ]


def _results(filesystem: StoreFilesystem) -> list[str]:
    """Return the results of actions, which are lost with what they name."""
    return list(filesystem.names(layout.ACTIONS))


class Stopped(datetime):
    """A clock that stands still, so that all stores come to hold the same documents."""

    @classmethod
    def now(cls, zone: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return NOW


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphkiln.tasks.compile.datetime", Stopped)


def _local_and_memory(folder: Path) -> list[StoreFilesystem]:
    memory = RemoteFilesystem(URL, {"medium": Medium(), "point": FaultPoint()})
    return [LocalFilesystem(folder / uuid.uuid4().hex), memory]


def test_a_disk_and_memory(fast_folder: Path) -> None:
    run_state_machine_as_test(
        lambda: Lockstep(lambda: _local_and_memory(fast_folder)),  # type: ignore[arg-type]
        settings=settings(QUICK, max_examples=40, stateful_step_count=20),
    )


@pytest.mark.s3
@pytest.mark.xdist_group("s3")
def test_a_disk_memory_and_s3(fast_folder: Path, s3_endpoint: str) -> None:
    def make() -> list[StoreFilesystem]:
        s3 = S3Filesystem(f"s3://{BUCKET}/{uuid.uuid4().hex}", options_for(s3_endpoint))
        return [*_local_and_memory(fast_folder), s3]

    run_state_machine_as_test(
        lambda: Lockstep(make),  # type: ignore[arg-type]
        settings=settings(QUICK, max_examples=4, stateful_step_count=10),
    )
