"""Leases: one holder, renewed while it lives, taken over by the observer's own clock once it does not."""

import threading
from pathlib import Path

import pytest

from graphkiln.storage import layout
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.documents import seal
from graphkiln.storage.leases import LONGEST_LIFE_SECONDS, LeaseRecord, Leases, Observation
from graphkiln.storage.store import Store, open_for_writing
from tests.storage.faults import DictFilesystem, FaultPoint, FaultyFilesystem

KEY = digest_bytes(b"action")
SECONDS = 30.0


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["local", "dict"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(DictFilesystem({})) if request.param == "dict" else open_for_writing(str(tmp_path / "store"))


def leases_of(store: Store, clock: Clock) -> Leases:
    return Leases(store, seconds=SECONDS, monotonic=clock)


def test_one_of_many_takes_a_lease_and_the_others_see_whose_it_is(store: Store) -> None:
    runs = [leases_of(store, Clock()) for _ in range(8)]
    taken = [run.take(KEY) for run in runs]
    held = [lease for lease in taken if isinstance(lease, LeaseRecord)]
    assert len(held) == 1
    for seen in taken[1:]:
        assert isinstance(seen, Observation)
        assert seen.owner == held[0].owner
        assert seen.record == held[0]


def test_a_released_lease_can_be_taken_again(store: Store) -> None:
    first, second = leases_of(store, Clock()), leases_of(store, Clock())
    lease = first.take(KEY)
    assert isinstance(lease, LeaseRecord)
    with first.holding(lease):
        seen = second.take(KEY)
        assert isinstance(seen, Observation)
    assert isinstance(second.take(KEY, seen), LeaseRecord)


def test_a_renewed_lease_never_expires_and_one_that_is_not_renewed_does(store: Store) -> None:
    owner, clock = leases_of(store, Clock()), Clock()
    observer = leases_of(store, clock)
    assert isinstance(owner.take(KEY), LeaseRecord)
    seen = observer.take(KEY)
    for _ in range(5):
        clock.now += SECONDS - 1
        owner.renew()
        assert isinstance(seen, Observation)
        seen = observer.take(KEY, seen)
        assert isinstance(seen, Observation)
    clock.now += SECONDS - 1
    assert isinstance(seen, Observation)
    seen = observer.take(KEY, seen)
    assert isinstance(seen, Observation)
    clock.now += 1
    assert isinstance(observer.take(KEY, seen), LeaseRecord)


@pytest.mark.parametrize("ahead", [-60.0, 60.0, 1e6])
def test_clocks_of_hosts_are_never_compared(store: Store, ahead: float) -> None:
    owner_clock, clock = Clock(), Clock()
    owner_clock.now += ahead
    assert isinstance(leases_of(store, owner_clock).take(KEY), LeaseRecord)
    observer = leases_of(store, clock)
    seen = observer.take(KEY)
    assert isinstance(seen, Observation)
    clock.now += SECONDS - 1
    assert isinstance(observer.take(KEY, seen), Observation)


def test_one_of_many_takes_a_dead_owners_lease_over(store: Store) -> None:
    leases_of(store, Clock()).take(KEY)
    clock = Clock()
    observers = [leases_of(store, clock) for _ in range(8)]
    seen = [observer.take(KEY) for observer in observers]
    clock.now += SECONDS
    taken = [
        observer.take(KEY, look)
        for observer, look in zip(observers, seen, strict=True)
        if isinstance(look, Observation)
    ]
    assert sum(isinstance(lease, LeaseRecord) for lease in taken) == 1


def test_an_owner_whose_lease_was_taken_over_neither_renews_nor_removes_it(store: Store) -> None:
    owner, clock = leases_of(store, Clock()), Clock()
    observer = leases_of(store, clock)
    lost = owner.take(KEY)
    assert isinstance(lost, LeaseRecord)
    seen = observer.take(KEY)
    assert isinstance(seen, Observation)
    clock.now += SECONDS
    taken = observer.take(KEY, seen)
    assert isinstance(taken, LeaseRecord)
    before = store.peek(layout.by_digest(layout.LEASES, KEY))
    owner.renew()
    owner.release(lost)
    assert store.peek(layout.by_digest(layout.LEASES, KEY)) == before
    observer.release(taken)
    assert store.peek(layout.by_digest(layout.LEASES, KEY)) is None


def test_a_damaged_lease_is_taken_over_when_it_expires(store: Store) -> None:
    clock = Clock()
    observer = leases_of(store, clock)
    assert store.create(layout.by_digest(layout.LEASES, KEY), b"\xff{ no lease")
    seen = observer.take(KEY)
    assert isinstance(seen, Observation)
    assert seen.owner == "somebody"
    clock.now += SECONDS
    assert isinstance(observer.take(KEY, seen), LeaseRecord)


def test_a_lease_is_ours_though_the_answers_to_its_writes_are_lost(caplog: pytest.LogCaptureFixture) -> None:
    """The first create is repeated by the client, and fails at its own object; the first two renewals seem to fail."""
    filesystem = DictFilesystem({})
    clock = Clock()
    creating = FaultPoint(0, "repeated")
    owner = Leases(Store(FaultyFilesystem(filesystem, creating)), seconds=SECONDS, monotonic=clock)
    lease = owner.take(KEY)
    assert isinstance(lease, LeaseRecord)
    contents = {next(iter(filesystem.objects.values()))}
    for fault in ("reply lost", "reply lost", "EIO", None):
        owner._store = Store(FaultyFilesystem(filesystem, FaultPoint(None if fault is None else 0, fault or "")))
        for _ in range(2):
            owner.renew()
            contents |= set(filesystem.objects.values())
    assert len(contents) == 1 + 7, "each renewal but the one that failed has written the lease"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    owner._store = Store(FaultyFilesystem(filesystem, FaultPoint(0, "reply lost")))
    owner.renew()
    owner._store = Store(filesystem)
    owner.release(lease)
    assert not filesystem.objects


def test_a_lease_that_cannot_be_given_back_expires(caplog: pytest.LogCaptureFixture) -> None:
    filesystem = DictFilesystem({})
    owner, clock = Leases(Store(FaultyFilesystem(filesystem, FaultPoint(1, "EIO")))), Clock()
    lease = owner.take(KEY)
    assert isinstance(lease, LeaseRecord)
    owner.release(lease)
    assert "could not be given back" in caplog.text
    observer = leases_of(Store(filesystem), clock)
    seen = observer.take(KEY)
    assert isinstance(seen, Observation)
    clock.now += SECONDS
    assert isinstance(observer.take(KEY, seen), LeaseRecord)


def test_racing_threads_take_a_lease_once(store: Store) -> None:
    barrier = threading.Barrier(8)
    taken: list[LeaseRecord | Observation] = []

    def take() -> None:
        run = leases_of(store, Clock())
        barrier.wait()
        taken.append(run.take(KEY))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 8
    assert sum(isinstance(lease, LeaseRecord) for lease in taken) == 1


def test_a_planted_lease_holds_nobody_up_for_ever(store: Store) -> None:
    planted = LeaseRecord(KEY, "token", "an attacker", "nonce", 1e12)
    assert store.create(layout.by_digest(layout.LEASES, KEY), seal("lease", planted))
    clock = Clock()
    observer = leases_of(store, clock)
    seen = observer.take(KEY)
    assert isinstance(seen, Observation)
    clock.now += LONGEST_LIFE_SECONDS
    assert isinstance(observer.take(KEY, seen), LeaseRecord)
