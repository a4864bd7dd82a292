"""Compaction: fewer parts, the same rows, whatever happens meanwhile."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from graphkiln.storage import catalog, compaction, layout
from graphkiln.storage.catalog import decode, encode, part_paths, store_table, table_of, write_part
from graphkiln.storage.compaction import LEASE_KEY, Compaction, compact_catalog
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.leases import LeaseRecord, Leases
from graphkiln.storage.store import Store, open_for_writing
from graphkiln.storage.verify import verify_store
from tests.storage.catalogs import expected, history, rows_in, run_of
from tests.storage.faults import FAULTS, DictFilesystem, FaultPoint, FaultyFilesystem, ends_of
from tests.storage.samples import flipped, harm

RUNS = 3
ROWS = [row for number in range(-1, RUNS) for row in run_of(number)]


def compact(store: Store) -> Compaction:
    """Compact by an observer whose clock runs fast, so that a lease that nobody renews expires at once."""
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += 60 * seconds

    with Leases(store, monotonic=lambda: now[0]) as leases:
        return compact_catalog(store, leases, tell_waiting=lambda _owner: None, wait=wait)


def fill(store: Store) -> list[str]:
    """Write some parts, one of them with a run that another one has."""
    paths = [write_part(store, run_of(number)) for number in range(RUNS)]
    return [*paths, store_table(store, table_of([*run_of(2), *run_of(-1)]))]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs of three rows fill a part."""
    monkeypatch.setattr(compaction, "FULL_PART_ROWS", 7)


def test_parts_become_few_with_the_same_rows(store: Store) -> None:
    fill(store)
    assert compact(store) == Compaction(before=4, after=2, rows=12, repeated_rows=3, damaged=())
    assert len(part_paths(store)) == 2
    assert rows_in(store) == expected(ROWS)
    assert not verify_store(store).problems
    assert not list(store.names(layout.LEASES))


def test_to_compact_again_changes_nothing(store: Store, filesystem: StoreFilesystem) -> None:
    fill(store)
    compact(store)
    before = {path: filesystem.read(path) for path in store.names("")}
    assert compact(store) == Compaction(before=2, after=2, rows=12, repeated_rows=0, damaged=())
    assert {path: filesystem.read(path) for path in store.names("")} == before


@pytest.mark.parametrize("runs", [0, 1])
def test_what_is_one_part_stays_so(tmp_path: Path, runs: int) -> None:
    store = Store(DictFilesystem({})) if runs else open_for_writing(str(tmp_path / "store"))
    for number in range(runs):
        write_part(store, run_of(number))
    before = list(store.names(""))
    assert compact(store) == Compaction(before=runs, after=runs, rows=3 * runs, repeated_rows=0, damaged=())
    assert list(store.names("")) == before


def test_a_full_part_is_left_alone_and_new_ones_are_merged_beside_it(store: Store) -> None:
    full = write_part(store, [row for number in (1, 2, 3) for row in run_of(number)])
    for number in (4, 5, 6):
        write_part(store, run_of(number))
    assert compact(store).after == 2
    assert full in part_paths(store)
    assert rows_in(store) == expected([row for number in range(1, 7) for row in run_of(number)])


def test_parts_that_hold_nothing_of_their_own_are_dropped(store: Store) -> None:
    kept = write_part(store, [row for number in (1, 2, 3) for row in run_of(number)])
    for number in (1, 2, 3):
        write_part(store, run_of(number))
    assert compact(store) == Compaction(before=4, after=1, rows=9, repeated_rows=9, damaged=())
    assert part_paths(store) == [kept]


def test_the_same_rows_become_the_same_part_whoever_merges_them() -> None:
    stores = [Store(DictFilesystem({})) for _ in range(2)]
    for store in stores:
        fill(store)
        compact(store)
    assert part_paths(stores[0]) == part_paths(stores[1])


def test_a_damaged_part_is_named_and_left_alone(
    store: Store, filesystem: StoreFilesystem, caplog: pytest.LogCaptureFixture
) -> None:
    paths = fill(store)
    harm(filesystem, paths[0], "cut in half")
    left = filesystem.read(paths[0])
    with caplog.at_level(logging.WARNING, logger="graphkiln"):
        done = compact(store)
    assert done.damaged == (paths[0],)
    assert [record.getMessage() for record in caplog.records if paths[0] in record.getMessage()]
    assert filesystem.read(paths[0]) == left
    assert rows_in(store) == expected([*run_of(-1), *run_of(1), *run_of(2)])


def test_many_rows_of_many_networks_are_the_same_before_and_after(store: Store) -> None:
    runs = list(history(12, 30))
    for rows in runs:
        write_part(store, rows)
    compact(store)
    assert rows_in(store) == expected([row for rows in runs for row in rows])


@pytest.mark.s3
@pytest.mark.xdist_group("s3")
def test_a_catalogue_on_s3(in_s3: Callable[[], StoreFilesystem]) -> None:
    store = Store(in_s3())
    fill(store)
    assert compact(store) == Compaction(before=4, after=2, rows=12, repeated_rows=3, damaged=())
    assert len(part_paths(store)) == 2
    assert rows_in(store) == expected(ROWS)


# ---------------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def filled() -> dict[str, bytes]:
    """The objects of a store with some parts."""
    filesystem = DictFilesystem({})
    fill(Store(filesystem))
    return filesystem.objects


def operations(filled: dict[str, bytes]) -> list[tuple[str, str]]:
    watched = FaultyFilesystem(DictFilesystem(filled))
    compact(Store(watched))
    return watched.point.operations


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_loses_no_row_and_the_next_compaction_ends(
    filled: dict[str, bytes], fault: str
) -> None:
    done = operations(filled)
    assert {operation for operation, _ in done} >= {"entries", "read", "create", "sync", "delete", "remove"}
    for at, operation in enumerate(done):
        filesystem = DictFilesystem(filled)
        failing = FaultyFilesystem(filesystem, FaultPoint(at, fault))
        with ends_of(fault, *operation):
            compact(Store(failing))
        store = Store(filesystem)
        assert rows_in(store) == expected(ROWS), (at, operation)
        assert compact(store).after == len(part_paths(store)) == 2, (at, operation)
        assert rows_in(store) == expected(ROWS), (at, operation)


def disturbed_at(inner: StoreFilesystem, at: int, disturb: Callable[[], object]) -> FaultyFilesystem:
    """Let something else happen before the operation number `at`."""
    return FaultyFilesystem(inner, FaultPoint(at, meanwhile=disturb))


def another_compaction(store: Store) -> None:
    compact(store)


def others_with_a_new_run(store: Store) -> None:
    compact(store)
    write_part(store, run_of(9))
    compact(store)


def one_that_makes_larger_parts(store: Store) -> None:
    small, compaction.FULL_PART_ROWS = compaction.FULL_PART_ROWS, 100
    compact(store)
    compaction.FULL_PART_ROWS = small


@pytest.mark.parametrize("disturb", [another_compaction, others_with_a_new_run, one_that_makes_larger_parts])
def test_compactions_that_meet_at_any_operation_lose_no_row(
    filled: dict[str, bytes], disturb: Callable[[Store], None]
) -> None:
    """As if this one had slept so long that its lease was taken over."""
    for at in range(len(operations(filled))):
        store = Store(filesystem := DictFilesystem(filled))
        compact(Store(disturbed_at(filesystem, at, functools.partial(disturb, store))))
        new = run_of(9) if disturb is others_with_a_new_run else []
        assert rows_in(store) == expected([*ROWS, *new]), at
        compact(store)
        assert compact(store).repeated_rows == 0, at
        assert rows_in(store) == expected([*ROWS, *new]), at


def test_one_that_finds_its_parts_gone_deletes_nothing(
    filled: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    done = operations(filled)
    last_listing = max(at for at, (operation, _) in enumerate(done) if operation == "entries")
    store = Store(filesystem := DictFilesystem(filled))
    disturbed = disturbed_at(filesystem, last_listing, lambda: one_that_makes_larger_parts(store))
    with caplog.at_level(logging.WARNING, logger="graphkiln"):
        compact(Store(disturbed))
    assert "another compaction was at work" in caplog.text
    assert "delete" not in {operation for operation, _ in disturbed.point.operations}
    assert rows_in(store) == expected(ROWS)


def test_a_medium_that_does_not_keep_what_is_written_costs_no_row(filled: dict[str, bytes]) -> None:
    class Spoiling(DictFilesystem):
        def create(self, path: str, data: bytes) -> bool:
            return super().create(path, flipped(data, -9) if path.startswith(layout.CATALOG) else data)

    store = Store(Spoiling(filled))
    with pytest.raises(DamagedStoreError, match="do not match the digest in its name"):
        compact(store)
    assert set(filled) < set(store.names(""))
    assert rows_in(store) == expected(ROWS)


def test_rows_that_pyarrow_loses_are_never_stored(filled: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(filesystem := DictFilesystem(filled))
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "encode", lambda table: encode(table.slice(1)))
        with pytest.raises(RuntimeError, match="does not read the rows that it wrote"):
            compact(store)
    assert filesystem.objects == filled


# ---------------------------------------------------------------------- the lease


def test_it_waits_for_another_and_says_for_whom() -> None:
    store = Store(DictFilesystem({}))
    fill(store)
    told: list[str] = []
    with Leases(store) as theirs, Leases(store) as ours:
        held = theirs.take(LEASE_KEY)
        assert isinstance(held, LeaseRecord)
        waits: list[float] = []

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                theirs.release(held)

        compact_catalog(store, ours, tell_waiting=told.append, wait=wait)
    assert told == [held.owner]
    assert len(waits) == 3
    assert len(part_paths(store)) == 2


# ---------------------------------------------------------------------- sizes


def test_merged_parts_have_fewer_rows_than_two_full_ones_and_runs_stay_whole() -> None:
    store = Store(filesystem := DictFilesystem({}))
    sizes = (1, 5, 5, 5, 2, 4)
    for number, size in enumerate(sizes):
        write_part(store, run_of(number, size))
    compact(store)
    found = [decode(filesystem.read(path), path) for path in part_paths(store)]
    assert all(len(table) < 2 * 7 for table in found)
    runs = [set(table["run"].to_pylist()) for table in found]
    assert sum(map(len, runs)) == len(set().union(*runs)) == len(sizes)
    assert {digest_bytes(encode(table)) for table in found} == {
        layout.digest_of_catalog_part(path) for path in part_paths(store)
    }
