"""Every byte of a small store flipped in turn, every object cut at twenty places: all of it noticed, or harmless."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pytest

from graphkiln.storage import layout
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.leases import LeaseRecord, Leases, Observation
from graphkiln.storage.records import QuarantineNote
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import DictFilesystem
from tests.storage.samples import (
    FAILURE_LOG,
    LOG,
    OLD_PLAN,
    OUTPUTS,
    PAYLOADS,
    Complete,
    encoded_ref,
    flipped,
    harm,
    load_toy,
    make_complete,
)

pytestmark = pytest.mark.usefixtures("without_warnings")

PLACES = 20
# To mend takes longer than to notice, so that only every so many flips are mended as well.
MENDED_EVERY = 20

LEASED = digest_bytes(b"an action that is being compiled")
LEASE = LeaseRecord(LEASED, "token", "process 1 on host-a", "nonce", 30.0)

Read = Callable[[Store], object]


@dataclass(frozen=True)
class Whole:
    """A store with everything that there can be.

    Attributes:
        objects: all of it.
        variant: what is committed there.
        readers: what those who need an object do to read it, by its path.
    """

    objects: Mapping[str, bytes]
    variant: tuple[str, str, Digest]
    readers: Mapping[str, Read]


@pytest.fixture(scope="module")
def whole() -> Whole:
    filesystem = DictFilesystem({})
    store = Store(filesystem)
    complete = make_complete(store)
    harm(filesystem, complete.paths["plan"], "cut in half")
    make_complete(store)  # which sets the damaged plan aside
    filesystem.create(layout.by_digest(layout.LEASES, LEASED), seal("lease", LEASE))
    readers = {**_readers_of_documents(complete), **_readers_of_blobs()}
    for path in filesystem.names(layout.QUARANTINE):
        readers[path] = _note_reader(path) if path.endswith(".note") else lambda store: "nobody needs it"
    assert sorted(readers) == list(filesystem.names(""))
    return Whole(filesystem.objects, complete.variant, readers)


def _readers_of_documents(complete: Complete) -> dict[str, Read]:
    paths, (forward, backward) = complete.paths, complete.plan.graphs
    return {
        paths["format"]: lambda store: store.read_format(),
        paths["plan"]: lambda store: store.read_plan(*complete.variant),
        paths["ref"]: lambda store: store.read_ref(*complete.variant),
        paths["manifest"]: lambda store: store.read_manifest(complete.manifest),
        paths["failure"]: lambda store: store.read_failure(complete.failed_key),
        paths["forward action"]: lambda store: store.read_action(forward.key),
        paths["backward action"]: lambda store: store.read_action(backward.key),
        layout.by_digest(layout.LEASES, LEASED): _observe_lease,
    }


def _readers_of_blobs() -> dict[str, Read]:
    contents = [LOG, FAILURE_LOG, OLD_PLAN, *PAYLOADS.values()]
    contents += [content for outputs in OUTPUTS.values() for content in outputs.values()]
    refs = [encoded_ref(content) for content in contents]
    return {
        layout.by_digest(layout.BLOBS, ref.digest): lambda store, ref=ref: store.get_blob(ref, "a blob")  # type: ignore[misc]
        for ref in refs
    }


def _note_reader(path: str) -> Read:
    return lambda store: unseal(store.read_raw(path), "quarantine note", QuarantineNote)


def _observe_lease(store: Store) -> LeaseRecord:
    """Read it as a run does that wants it, which gets it in the end whatever it holds."""
    now = 0.0
    run = Leases(store, monotonic=lambda: now)
    seen = run.take(LEASED)
    assert isinstance(seen, Observation)
    now += LEASE.seconds
    taken = run.take(LEASED, seen)
    assert isinstance(taken, LeaseRecord)
    run.close()
    if seen.record is None:
        raise DamagedStoreError("its bytes do not match its digest")
    return seen.record


def test_every_byte_flipped(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    def flips(path: str, data: bytes) -> Iterable[bytes]:
        bits = random.Random(path)  # noqa: S311
        return (flipped(data, place, 1 << bits.randrange(8)) for place in range(len(data)))

    _harm_all(whole, flips, MENDED_EVERY, "flipped bytes", capsys)


def test_every_object_cut_at_twenty_places(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    def cuts(path: str, data: bytes) -> Iterable[bytes]:
        return (data[:length] for length in sorted({len(data) * place // PLACES for place in range(PLACES)}))

    _harm_all(whole, cuts, 1, "cuts", capsys)


def _harm_all(
    whole: Whole,
    harms: Callable[[str, bytes], Iterable[bytes]],
    mended_every: int,
    title: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts: Counter[str] = Counter()
    for path, data in whole.objects.items():
        for number, harmed in enumerate(harms(path, data)):
            assert harmed != data
            objects = {**whole.objects, path: harmed}
            try:
                counts[_noticed_or_harmless(whole, path, objects)] += 1
                if number % mended_every == 0:
                    _is_mended(whole, objects)
                    counts["mended"] += 1
            except Exception as error:
                error.add_note(f"{title}: number {number} of {path}")
                raise
    with capsys.disabled():
        found = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        print(f"\n{title} in {len(whole.objects)} objects of {sum(map(len, whole.objects.values()))} bytes: {found}")


def _noticed_or_harmless(whole: Whole, path: str, objects: dict[str, bytes]) -> str:
    store = Store(DictFilesystem(objects))
    problems = {problem.path: problem.severity for problem in verify_store(store).problems}
    try:
        loaded = load_toy(store, whole.variant)
    except DamagedStoreError as error:
        assert error.path == path
    else:
        assert loaded == OUTPUTS
    expected = whole.readers[path](Store(DictFilesystem(dict(whole.objects))))
    try:
        read = whole.readers[path](store)
    except DamagedStoreError:
        # What nobody depends on is reported, but it is no damage.
        unneeded = path.startswith((layout.QUARANTINE, layout.LEASES))
        assert problems.get(path) == ("leftover" if unneeded else "damage")
        return "noticed"
    assert read == expected
    assert "damage" not in problems.values()
    return "harmless"


def _is_mended(whole: Whole, objects: dict[str, bytes]) -> None:
    store = Store(DictFilesystem(objects))
    make_complete(store)
    assert load_toy(store, whole.variant) == OUTPUTS
    assert not verify_store(store).damaged
