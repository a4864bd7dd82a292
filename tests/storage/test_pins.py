"""Pins: they hold until they expire, and whoever writes one waits for a collector that may not have seen it."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from graphkiln.storage import layout
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.documents import seal
from graphkiln.storage.errors import BadInputError, DamagedStoreError
from graphkiln.storage.pins import (
    CLOCK_SKEW,
    RUN_PIN_LIFE,
    SWEEP_SECONDS,
    RunPin,
    pin_manifest,
    pin_variant,
    pins_of,
    remove_variant,
    unpin_variant,
    wait_for_sweep,
)
from graphkiln.storage.records import SweepRecord
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import DictFilesystem
from tests.storage.samples import NOW, make_complete

KEYS = [digest_bytes(b"%d" % number) for number in range(4)]
VARIANT = ("toy", "host", KEYS[0])


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def filesystem() -> DictFilesystem:
    return DictFilesystem({})


@pytest.fixture
def store(filesystem: DictFilesystem, clock: Clock) -> Store:
    return Store(filesystem, now=clock)


def test_a_run_pins_more_and_more_until_it_ends(store: Store) -> None:
    pin = RunPin(store, VARIANT)
    assert list(pins_of(store)) == []
    pin.add(actions=KEYS[:1], blobs=KEYS[1:2])
    pin.add(actions=KEYS[:2], blobs=KEYS[2:3])
    ((_, record),) = pins_of(store)
    assert (record.network, record.target, record.variant) == VARIANT
    assert set(record.actions) == {*KEYS[:2]}
    assert set(record.blobs) == {*KEYS[1:3]}
    assert record.expires_at == NOW + RUN_PIN_LIFE
    pin.close()
    pin.close()
    assert list(pins_of(store)) == []
    assert list(store.names(layout.PINS)) == []


def test_a_run_that_is_killed_holds_nothing_for_ever_and_one_that_lives_does(store: Store, clock: Clock) -> None:
    killed, alive = RunPin(store, VARIANT), RunPin(store, VARIANT)
    for pin in (killed, alive):
        pin.add(actions=KEYS[:1])
    clock.now += RUN_PIN_LIFE
    assert len(list(pins_of(store))) == 2  # the hosts' clocks may differ by a little
    alive.renew()
    clock.now += CLOCK_SKEW
    ((_, record),) = pins_of(store)
    assert record.expires_at == NOW + 2 * RUN_PIN_LIFE
    alive.close()
    assert list(pins_of(store)) == []


def test_a_pin_that_was_collected_while_its_run_was_suspended_comes_back(store: Store) -> None:
    pin = RunPin(store, VARIANT)
    pin.add(actions=KEYS[:1])
    (path,) = store.names(layout.PINS)
    store.delete_many([path])
    pin.renew()
    ((_, record),) = pins_of(store)
    assert record.actions == (KEYS[0],)


def test_a_pin_that_is_left_holds_the_manifest_until_it_expires(store: Store, clock: Clock) -> None:
    pin = RunPin(store, VARIANT)
    pin.add(actions=KEYS)
    pin.leave(KEYS[3])
    pin.close()
    clock.now += RUN_PIN_LIFE / 2
    pin.renew()
    ((_, record),) = pins_of(store)
    assert (record.manifests, record.actions, record.expires_at) == ((KEYS[3],), (), NOW + RUN_PIN_LIFE)


def test_pins_of_people(store: Store, clock: Clock) -> None:
    complete = make_complete(store)
    with pytest.raises(BadInputError, match="is not committed: there is nothing to pin"):
        pin_variant(store, VARIANT, reason="x", life=None)
    pin_variant(store, complete.variant, reason="the big run", life=None)
    ((_, record),) = pins_of(store)
    assert (record.manifests, record.reason, record.expires_at) == ((complete.manifest,), "the big run", None)
    with pytest.raises(BadInputError, match="is pinned \\(the big run\\): unpin it first") as caught:
        remove_variant(store, complete.variant)
    assert caught.value.reason == "pinned"
    clock.now += timedelta(days=10_000)
    assert len(list(pins_of(store))) == 1
    pin_variant(store, complete.variant, reason="a day more", life=timedelta(days=1))
    ((_, record),) = pins_of(store)  # a variant has one pin, the last one
    assert record.expires_at == clock.now + timedelta(days=1)
    assert unpin_variant(store, complete.variant)
    assert not unpin_variant(store, complete.variant)
    assert list(pins_of(store)) == []


def test_what_is_removed_is_kept_for_a_day(store: Store, clock: Clock) -> None:
    complete = make_complete(store)
    assert remove_variant(store, complete.variant)
    assert store.read_ref(*complete.variant) is None
    assert store.read_plan(*complete.variant) is None
    ((_, record),) = pins_of(store)
    assert (record.manifests, record.expires_at) == ((complete.manifest,), NOW + timedelta(days=1))
    assert not remove_variant(store, complete.variant)


@pytest.mark.parametrize("harm", [b"", b"{}"])
def test_a_damaged_pin_stops_collections_while_it_may_hold(
    store: Store, filesystem: DictFilesystem, clock: Clock, harm: bytes
) -> None:
    RunPin(store, VARIANT).add(actions=KEYS)
    (path,) = store.names(layout.PINS)
    filesystem.objects[path] = harm
    filesystem.modified[path] = NOW.timestamp()
    with pytest.raises(DamagedStoreError, match="nobody knows what it keeps; it expires within 1:00:00"):
        list(pins_of(store))
    assert [problem.severity for problem in verify_store(store).problems if problem.path == path] == ["leftover"]
    clock.now += RUN_PIN_LIFE + 2 * CLOCK_SKEW
    assert list(pins_of(store)) == []

    complete = make_complete(store)
    pin_variant(store, complete.variant, reason="x", life=None)
    kept = layout.by_variant(layout.KEPT_PINS, *complete.variant)
    filesystem.objects[kept] = harm
    with pytest.raises(DamagedStoreError, match="pin that variant again"):
        list(pins_of(store))
    assert [problem.severity for problem in verify_store(store).problems if problem.path == kept] == ["damage"]
    pin_variant(store, complete.variant, reason="again", life=None)
    assert [record.reason for _, record in pins_of(store)] == ["again"]


# ---------------------------------------------------------------------- waiting for a collector


def sweep(store: Store, nonce: str) -> None:
    store.put(layout.SWEEP, seal("sweep", SweepRecord("a collector", nonce, 30.0)))


class Waiting:
    """Counts the waits, and does something at each of them; its clock moves only with them."""

    def __init__(self, *then: Callable[[], object]) -> None:
        self.then, self.waited = list(then), 0.0

    def sleep(self, seconds: float) -> None:
        self.waited += seconds
        if self.then:
            self.then.pop(0)()

    def monotonic(self) -> float:
        return self.waited


def test_nobody_waits_if_nothing_is_deleted(store: Store) -> None:
    waiting = Waiting()
    wait_for_sweep(store, sleep=waiting.sleep, monotonic=waiting.monotonic)
    assert waiting.waited == 0


def test_a_batch_that_ends_or_is_followed_by_another_ends_the_wait(store: Store) -> None:
    for ending in (lambda: store.delete_many([layout.SWEEP]), lambda: sweep(store, "next")):
        sweep(store, "first")
        waiting = Waiting(lambda: None, lambda: None, ending)
        wait_for_sweep(store, sleep=waiting.sleep, monotonic=waiting.monotonic)
        assert not waiting.then
        assert 0 < waiting.waited < 1


@pytest.mark.parametrize("harm", [None, b"", b"{"])
def test_a_collector_that_was_killed_is_waited_for_as_long_as_it_said(
    store: Store, filesystem: DictFilesystem, harm: bytes | None
) -> None:
    sweep(store, "first")
    if harm is not None:
        filesystem.objects[layout.SWEEP] = harm
    waiting = Waiting()
    wait_for_sweep(store, sleep=waiting.sleep, monotonic=waiting.monotonic)
    expected = 30 if harm is None else SWEEP_SECONDS
    assert expected <= waiting.waited < expected + 2
    assert store.peek(layout.SWEEP) is None


def test_a_planted_sweep_holds_nobody_up_for_ever(store: Store) -> None:
    store.put(layout.SWEEP, seal("sweep", SweepRecord("an attacker", "nonce", 1e12)))
    waiting = Waiting()
    wait_for_sweep(store, sleep=waiting.sleep, monotonic=waiting.monotonic)
    assert waiting.waited < 3700


def test_a_trainers_pin(store: Store, clock: Clock) -> None:
    pin_manifest(store, VARIANT, KEYS[1], reason="a trainer", life=timedelta(hours=12))
    ((path, record),) = pins_of(store)
    assert path.startswith(layout.MANIFEST_PINS)
    assert (record.manifests, record.expires_at) == ((KEYS[1],), NOW + timedelta(hours=12))
