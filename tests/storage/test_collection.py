"""Collection: what is needed stays, what is not goes, at every moment and beside every run."""

import functools
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

import msgspec
import pytest

from graphkiln.storage import collection, layout
from graphkiln.storage.blobs import encode
from graphkiln.storage.collection import Collection, Collector
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal
from graphkiln.storage.errors import StoreUnavailableError
from graphkiln.storage.filesystem import Entry
from graphkiln.storage.leases import LeaseRecord, Leases
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.pins import RunPin, pin_manifest, pin_variant, pins_of, remove_variant
from graphkiln.storage.records import Manifest, Plan, PlanDocument, PlannedGraph, Superseded, VariantName
from graphkiln.storage.results import usable_result
from graphkiln.storage.retention import Policy
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import DictFilesystem, FaultPoint, FaultyFilesystem, KilledError
from tests.storage.samples import NOW, failure_of, load_toy, make_complete, plan_of, ref_of, result_of

DAY = timedelta(days=1)
AT_ONCE = Policy(grace=timedelta(0))


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now

    def seconds(self) -> float:
        return self.now.timestamp()


class Kiln:
    """A store in a dict, whose objects are as old as its clock says, and networks that share kernel graphs."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.filesystem = DictFilesystem({}, self.clock.seconds)
        self.store = Store(self.filesystem, now=self.clock)
        self.store.prepare_for_writing()

    def commit(self, network: str, *kernels: bytes, failing: Iterable[bytes] = (), pinned: bool = False) -> Plan:
        """Do what a run does, and commit unless a kernel fails. Without a pin nothing protects it but the grace."""
        plan = plan_for(network, *kernels, *failing)
        pin = RunPin(self.store, variant_of(plan))
        if pinned:
            pin_all(plan, pin)
        write(self.store, plan, failing=failing)
        if not failing:
            publish(self.store, plan, pin)
        pin.close()
        return plan

    def collect(self, policy: Policy = AT_ONCE, *, dry_run: bool = False) -> Collection:
        collector = Collector(self.store, policy)
        planned = collector.plan()
        if dry_run:
            return planned
        done = collector.run()
        assert msgspec.structs.replace(planned, dry_run=False) == done
        assert not self.damage()
        return done

    def damage(self) -> list[str]:
        return [problem.message for problem in verify_store(self.store).problems if problem.severity == "damage"]

    def paths(self) -> set[str]:
        return {path for path in self.filesystem.objects if path != layout.FORMAT}


def plan_for(network: str, *kernels: bytes) -> Plan:
    return plan_of({f"k{number}": encode(kernel)[0] for number, kernel in enumerate(kernels)}, network)


def variant_of(plan: Plan) -> VariantName:
    return plan.network.name, plan.target.name, plan.variant


def kernel_of(plan: Plan, graph: PlannedGraph, kernels: Iterable[bytes]) -> bytes:
    return next(kernel for kernel in kernels if encode(kernel)[0] == graph.payload)


def artifact_of(kernel: bytes) -> dict[str, bytes]:
    return {"executable": b"compiled " + kernel, "contract": b"a contract that many share"}


def pin_all(plan: Plan, pin: RunPin) -> None:
    blobs = {graph.payload.digest for graph in plan.graphs}
    for graph in plan.graphs:
        kernel = KERNELS_BY_DIGEST[graph.payload.digest]
        blobs |= {encode(content)[0].digest for content in artifact_of(kernel).values()}
    pin.add(actions=[graph.key for graph in plan.graphs], blobs=blobs)


def write(store: Store, plan: Plan, failing: Iterable[bytes] = ()) -> None:
    kernels = [KERNELS_BY_DIGEST[graph.payload.digest] for graph in plan.graphs]
    for kernel in kernels:
        store.put_blob(kernel)
    store.write_plan(PlanDocument(plan, store.now(), None))
    for graph, kernel in zip(plan.graphs, kernels, strict=True):
        if kernel not in failing and usable_result(store, graph.key) is None:
            outputs = {name: store.put_blob(content) for name, content in artifact_of(kernel).items()}
            store.write_action(result_of(plan, graph, outputs, None))


def publish(store: Store, plan: Plan, pin: RunPin) -> None:
    artifacts = {}
    for graph in plan.graphs:
        result = usable_result(store, graph.key)
        assert result is not None
        artifacts[graph.name] = dict(result.outputs)
    manifest = Manifest(plan, artifacts)
    pin.add(manifests=[digest_bytes(seal("manifest", manifest))])
    digest = store.write_manifest(manifest)
    before = store.read_ref(*variant_of(plan))
    if before is None or before.manifest != digest:
        now = store.now()
        superseded = (Superseded(before.manifest, now), *before.superseded) if before else ()
        store.write_ref(msgspec.structs.replace(ref_of(plan, digest), committed_at=now, superseded=superseded))


KERNELS = [b"one", b"two", b"three", b"four " * 2000]
KERNELS_BY_DIGEST = {encode(kernel)[0].digest: kernel for kernel in KERNELS}
ONE, TWO, THREE, FOUR = KERNELS


@pytest.fixture
def kiln() -> Kiln:
    return Kiln()


def loads(kiln: Kiln, plan: Plan) -> bool:
    found = load_toy(kiln.store, variant_of(plan))
    if found is None:
        return False
    expected = {graph.name: artifact_of(KERNELS_BY_DIGEST[graph.payload.digest]) for graph in plan.graphs}
    assert found == expected
    return True


# ---------------------------------------------------------------------- what is needed, and what is not


def test_an_empty_store_and_one_that_needs_everything_lose_nothing(kiln: Kiln) -> None:
    size = len(kiln.filesystem.objects[layout.FORMAT])
    assert kiln.collect() == Collection(dry_run=False, dropped=(), freed=(), kept_objects=1, kept_bytes=size)
    plan = kiln.commit("toy", ONE, FOUR)
    before = dict(kiln.filesystem.objects)
    found = kiln.collect()
    assert (found.freed, found.kept_objects) == ((), len(before))
    assert kiln.filesystem.objects == before
    assert loads(kiln, plan)


def test_what_a_changed_network_no_longer_needs_goes_after_the_grace_period(kiln: Kiln) -> None:
    old = kiln.commit("toy", ONE, TWO)
    first = kiln.paths()
    kiln.clock.now += 10 * DAY
    new = kiln.commit("toy", ONE, THREE)
    assert new.variant == old.variant
    everything = kiln.paths()

    # What was replaced a moment ago may still be being loaded, however long ago it was written.
    assert kiln.collect(Policy(grace=DAY)).freed == ()
    kiln.clock.now += 2 * DAY
    would = kiln.collect(Policy(grace=DAY), dry_run=True)
    assert kiln.paths() == everything
    ((network, objects, _),) = [msgspec.structs.astuple(item) for item in would.freed]
    assert (network, objects) == ("toy", 4)  # the old manifest, an action, a payload, an executable
    kiln.collect(Policy(grace=DAY))
    gone = everything - kiln.paths()
    assert len(gone) == objects
    assert gone < first
    assert sorted(path.partition("/")[0] for path in gone) == ["actions", "blobs", "blobs", "manifests"]
    assert loads(kiln, new)


def test_orphans_of_no_network_and_leftovers(kiln: Kiln) -> None:
    plan = kiln.commit("mine", ONE)
    needed = kiln.paths()
    make_complete(kiln.store)  # whose failure record belongs to no plan
    complete = make_complete(kiln.store).variant
    remove_variant(kiln.store, complete)
    kiln.store.put_blob(b"nobody needs this")
    kiln.filesystem.create("blobs/aa/.tmp-killed", b"half")
    kiln.filesystem.create("notes-of-a-user.txt", b"not ours")
    kiln.clock.now += 1.5 * DAY
    found = kiln.collect(Policy(grace=DAY))
    assert [item.network for item in found.freed] == ["", "toy"]
    assert kiln.paths() == needed | {"notes-of-a-user.txt"}
    assert loads(kiln, plan)


def test_a_failed_network_keeps_what_has_succeeded_and_why_it_failed(kiln: Kiln) -> None:
    plan = kiln.commit("toy", ONE, failing=[TWO])
    failed = plan.graphs[1].key
    log = kiln.store.put_blob(b"error: no registers")
    kiln.store.write_failure(failure_of(failed, "compiler-error", "no registers", log))
    kiln.clock.now += 100 * DAY
    before = kiln.paths()
    assert kiln.collect().freed == ()
    assert kiln.paths() == before
    dropped = kiln.collect(Policy(older_than=30 * DAY))
    assert dropped.dropped == (variant_of(plan),)
    assert kiln.paths() == set()


def test_quarantined_objects_are_kept_for_a_week_from_when_they_were_set_aside(kiln: Kiln) -> None:
    plan = kiln.commit("toy", ONE)
    kiln.clock.now += 30 * DAY
    (action,) = kiln.store.names(layout.ACTIONS)
    kiln.filesystem.objects[action] = b"damaged"
    assert usable_result(kiln.store, layout.digest_of(action) or Digest("")) is None
    # A rename keeps the time of the object; only its note is new.
    assert {kiln.filesystem.modified[path] for path in kiln.store.names(layout.QUARANTINE)} == {
        kiln.clock.seconds(),
        NOW.timestamp(),
    }
    write(kiln.store, plan)
    kiln.clock.now += 6 * DAY
    kiln.collect()
    assert len(list(kiln.store.names(layout.QUARANTINE))) == 2
    kiln.clock.now += 2 * DAY
    kiln.collect()
    assert list(kiln.store.names(layout.QUARANTINE)) == []


def test_policies_drop_variants_but_no_shared_kernel_graph_and_no_pinned_one(kiln: Kiln) -> None:
    old = kiln.commit("old", ONE, TWO)
    pinned = kiln.commit("pinned", ONE)
    pin_variant(kiln.store, variant_of(pinned), reason="x", life=None)
    kiln.clock.now += 40 * DAY
    new = kiln.commit("new", TWO, THREE)
    kiln.clock.now += 2 * DAY
    found = kiln.collect(Policy(older_than=30 * DAY))
    assert found.dropped == (variant_of(old),)
    assert [item.network for item in found.freed] == ["old"]
    assert not loads(kiln, old)
    assert loads(kiln, pinned)
    assert loads(kiln, new)
    smallest = kiln.collect(Policy(max_bytes=0))
    assert smallest.dropped == (variant_of(new),)
    assert loads(kiln, pinned)


def test_the_size_of_what_is_pinned_counts_once(kiln: Kiln) -> None:
    kiln.commit("pinned", FOUR)
    plan = kiln.commit("free", ONE)
    pin_variant(kiln.store, variant_of(kiln.commit("pinned", FOUR)), reason="x", life=None)
    kiln.clock.now += 2 * DAY
    size = kiln.collect(dry_run=True).kept_bytes
    assert kiln.collect(Policy(max_bytes=size), dry_run=True).dropped == ()
    assert kiln.collect(Policy(max_bytes=size - 1), dry_run=True).dropped == (variant_of(plan),)


def test_a_variant_that_came_to_this_store_lately_is_not_old(kiln: Kiln) -> None:
    """As one from a bundle, whose commit is as old as it is on the host that made it."""
    plan = kiln.commit("toy", ONE)
    kiln.clock.now += 40 * DAY
    for path in kiln.filesystem.objects:
        kiln.filesystem.modified[path] = kiln.clock.seconds()
    assert kiln.collect(Policy(older_than=30 * DAY)).dropped == ()
    assert loads(kiln, plan)


def test_a_pin_that_is_written_again_beside_a_collection_stays(kiln: Kiln) -> None:
    """At every operation of a collection that was about to take it away, as it had expired."""
    plan = kiln.commit("toy", ONE)
    pin_variant(kiln.store, variant_of(plan), reason="x", life=DAY)
    kiln.clock.now += 10 * DAY
    at = 0
    while True:
        inner = _copy_of(kiln)
        store = Store(inner, now=kiln.clock)
        ((path, pin),) = [(path, store.read_pin(path)) for path in store.names(layout.KEPT_PINS)]
        assert pin is not None
        again = msgspec.structs.replace(pin, reason="again", expires_at=None)
        faulty = FaultyFilesystem(inner, FaultPoint(at, meanwhile=functools.partial(store.write_pin, path, again)))
        Collector(Store(faulty, now=kiln.clock), Policy(max_bytes=0, grace=DAY)).run()
        if at >= len(faulty.point.operations):
            break
        assert [pin.reason for _, pin in pins_of(store)] == ["again"], (at, faulty.point.operations[at])
        at += 1
    assert at > 20


def test_a_network_that_a_run_used_lately_is_not_old(kiln: Kiln) -> None:
    plan = kiln.commit("toy", ONE)
    kiln.clock.now += 40 * DAY
    document = kiln.store.read_plan(*variant_of(plan))
    assert document is not None
    kiln.store.write_plan(msgspec.structs.replace(document, used_at=kiln.clock.now))
    assert kiln.collect(Policy(older_than=30 * DAY)).dropped == ()


def test_a_trainers_pin_outlives_its_variant(kiln: Kiln) -> None:
    plan = kiln.commit("toy", ONE)
    ref = kiln.store.read_ref(*variant_of(plan))
    assert ref is not None
    pin_manifest(kiln.store, variant_of(plan), ref.manifest, reason="a trainer", life=timedelta(hours=12))
    kiln.clock.now += timedelta(hours=6)
    found = kiln.collect(Policy(max_bytes=0, grace=timedelta(0)))
    assert found.dropped == (variant_of(plan),)
    manifest = kiln.store.read_manifest(ref.manifest)
    for outputs in manifest.artifacts.values():
        for blob in outputs.values():
            kiln.store.get_blob(blob, "an output")
    kiln.clock.now += timedelta(hours=7)
    kiln.collect()
    assert kiln.paths() == set()


def test_damaged_documents_are_kept_for_those_who_mend_them(kiln: Kiln) -> None:
    plan = kiln.commit("toy", ONE, TWO)
    kiln.clock.now += 10 * DAY
    whole = dict(kiln.filesystem.objects)
    for path in whole:
        if path.startswith((f"{layout.BLOBS}/", layout.FORMAT)):
            continue
        kiln.filesystem.objects[path] = b"damaged"
        Collector(kiln.store, AT_ONCE).run()
        assert kiln.filesystem.objects[path] == b"damaged"
        lost = whole.keys() - kiln.filesystem.objects.keys()
        # Of a damaged action the outputs may go if nothing else names them; the manifest does.
        assert lost == set()
        kiln.filesystem.objects[path] = whole[path]
    assert loads(kiln, plan)


# ---------------------------------------------------------------------- killed, and several at once


def test_killed_at_any_operation_it_hurts_nothing_and_can_be_run_again(kiln: Kiln) -> None:
    kiln.commit("toy", ONE, TWO)
    kept = kiln.commit("kept", TWO, FOUR)
    kiln.clock.now += 10 * DAY
    kiln.commit("toy", ONE, THREE)
    kiln.clock.now += 2 * DAY
    policy = Policy(keep_last=1, grace=DAY, older_than=11 * DAY)
    pin_variant(kiln.store, variant_of(kept), reason="x", life=None)
    counting = FaultyFilesystem(_copy_of(kiln))
    Collector(Store(counting, now=kiln.clock), policy).run()
    tried = 0
    for at in range(len(counting.point.operations)):
        for fault in ("killed before", "killed after", "EIO", "reply lost"):
            inner = _copy_of(kiln)
            faulty = Store(FaultyFilesystem(inner, FaultPoint(at, fault)), now=kiln.clock)
            with pytest.raises((KilledError, StoreUnavailableError)):
                Collector(faulty, policy).run()
                raise StoreUnavailableError("the fault did not matter", reason="none")
            whole = Store(inner, now=kiln.clock)
            assert not [p for p in verify_store(whole).problems if p.severity == "damage"]
            assert load_toy(whole, variant_of(kept)) is not None
            waited = Waited()
            Collector(whole, policy, sleep=waited.sleep, monotonic=waited.monotonic).run()
            assert waited.seconds <= 35
            left = {path for path in inner.objects if not path.startswith((layout.LEASES, "collection/"))}
            assert left == {path for path in counting.names("") if not path.startswith(layout.LEASES)}
            tried += 1
    print(f"{tried} points in a collection, each survived")
    assert tried > 100


def _copy_of(kiln: Kiln) -> DictFilesystem:
    copy = DictFilesystem(kiln.filesystem.objects, kiln.clock.seconds)
    copy.modified = dict(kiln.filesystem.modified)
    return copy


class Waited:
    """A clock that moves with the sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def monotonic(self) -> float:
        return self.seconds


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.0, 4.0, 6.0, 20.0])
def test_a_store_whose_roots_take_long_to_read_is_collected_all_the_same(kiln: Kiln, seconds: float) -> None:
    """A run has to wait the longer for a batch, and the collector is heard of before it is given up."""
    kiln.store.put_blob(b"nobody needs this")
    kiln.clock.now += 2 * DAY
    waited = Waited()

    class Slow(DictFilesystem):
        def entries(self, folder: str) -> Iterator[Entry]:
            waited.sleep(seconds)
            assert waited.seconds < 1000, "it goes round in circles"
            return super().entries(folder)

    slow = Slow(kiln.filesystem.objects, kiln.clock.seconds)
    found = Collector(Store(slow, now=kiln.clock), Policy(), monotonic=waited.monotonic).run()
    assert [item.objects for item in found.freed] == [1]


def test_two_collectors_take_turns(kiln: Kiln) -> None:
    kiln.commit("toy", ONE)
    waited = Waited()
    with Leases(kiln.store) as leases:
        lease = leases.take(collection._COLLECTOR)
        assert isinstance(lease, LeaseRecord)

        def renew_and_sleep(seconds: float) -> None:
            leases.renew()
            waited.sleep(seconds)

        other = Collector(kiln.store, AT_ONCE, sleep=renew_and_sleep, monotonic=waited.monotonic)
        with pytest.raises(StoreUnavailableError, match=r"another collection .* is at work, by process") as caught:
            other.run()
        assert (caught.value.reason, caught.value.retryable) == ("collecting", True)
        leases.release(lease)
    other = Collector(kiln.store, AT_ONCE, sleep=waited.sleep, monotonic=waited.monotonic)
    assert other.run().freed == ()


# ---------------------------------------------------------------------- beside a run


def _old_store(kiln: Kiln) -> None:
    """Everything of these networks but what `kept` needs is about to go, and is old."""
    kiln.commit("toy", ONE, TWO)
    kiln.commit("kept", FOUR)
    for folder in (layout.REFS, layout.PLANS):
        (path,) = (path for path in kiln.store.names(folder) if "/toy/" in path)
        kiln.filesystem.delete(path)
    kiln.clock.now += 100 * DAY


def test_a_run_that_starts_at_any_moment_of_a_collection_loses_nothing(kiln: Kiln) -> None:
    """It finds the results of a network that was removed long ago, at every operation of the collector."""
    _old_store(kiln)
    at, reused, compiled = 0, 0, 0
    while True:
        inner = _copy_of(kiln)
        run = _Run(Store(inner, now=kiln.clock))
        filesystem = FaultyFilesystem(inner, FaultPoint(at, meanwhile=run.start))
        collector = Collector(Store(filesystem, now=kiln.clock), AT_ONCE)
        collector.run()
        if not run.started:
            break
        run.finish()
        reused += run.reused
        compiled += not run.reused
        store = Store(inner, now=kiln.clock)
        assert not [p.message for p in verify_store(store).problems if p.severity == "damage"], at
        assert load_toy(store, variant_of(run.plan)) is not None
        at += 1
    assert reused > 10
    assert compiled > 10
    print(f"a run beside a collection at {at} moments: {reused} times it used what was there")


class _Run:
    """A run in a thread of its own, which hands back as soon as it waits for the collector, or has ended."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._paused, self._go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None
        self.plan = plan_for("again", ONE, TWO)
        self.started, self.reused = False, False

    def start(self) -> None:
        self.started = True
        self._thread.start()
        assert self._paused.wait(30)

    def finish(self) -> None:
        self._go_on.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _wait(self, _seconds: float) -> None:
        self._paused.set()
        assert self._go_on.wait(30)

    def _run(self) -> None:
        try:
            pin = RunPin(self._store, variant_of(self.plan), sleep=self._wait)
            pin_all(self.plan, pin)
            self.reused = usable_result(self._store, self.plan.graphs[0].key) is not None
            write(self._store, self.plan)
            publish(self._store, self.plan, pin)
            pin.close()
        except BaseException as error:  # noqa: BLE001  # it is raised again where the test sees it
            self._error = error
        finally:
            self._paused.set()


def test_a_collector_that_starts_at_any_moment_of_a_run_takes_nothing_from_it(kiln: Kiln) -> None:
    _old_store(kiln)
    plan = plan_for("again", ONE, THREE)
    at, collected = 0, set()
    while True:
        inner = _copy_of(kiln)
        done: list[Collection] = []

        def collect(inner: DictFilesystem = inner, done: list[Collection] = done) -> None:
            done.append(Collector(Store(inner, now=kiln.clock), AT_ONCE).run())

        run = Store(FaultyFilesystem(inner, FaultPoint(at, meanwhile=collect)), now=kiln.clock)
        pin = RunPin(run, variant_of(plan))
        pin_all(plan, pin)
        write(run, plan)
        publish(run, plan, pin)
        pin.close()
        if not done:
            break
        store = Store(inner, now=kiln.clock)
        assert not [p.message for p in verify_store(store).problems if p.severity == "damage"], at
        assert load_toy(store, variant_of(plan)) is not None
        collected.add(done[0].freed)
        at += 1
    assert at > 20
    assert len(collected) > 1


def test_on_a_disk(tmp_path: object, kiln: Kiln) -> None:
    """Where age is the file's own."""
    store = Store(LocalFilesystem(str(tmp_path)))
    store.prepare_for_writing()
    store.put_blob(b"nobody needs this")
    assert Collector(store, Policy()).run().freed == ()
    found = Collector(store, AT_ONCE).run()
    assert [(item.network, item.objects) for item in found.freed] == [("", 1)]
    assert [path for path in store.names("") if path.startswith(layout.BLOBS)] == []
    assert seal("store format", store.read_format() or Superseded(Digest(""), NOW)) == store.read_raw(layout.FORMAT)
