"""Many blobs and results at once: the same checks as one by one, and damage hides nothing else."""

import logging

import msgspec
import pytest

from graphkiln.storage import layout, objects
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import DamagedStoreError, StoreUnavailableError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.objects import in_batches
from graphkiln.storage.results import usable_result, usable_results
from graphkiln.storage.store import Store
from tests.storage.faults import DictFilesystem, FaultyFilesystem
from tests.storage.samples import FORWARD, HARMS, harm, make_complete, noise

# Both encodings, an empty one, and one that is there twice.
CONTENTS = [
    b"",
    *(b"content %d\n" % number * (number * 40) for number in range(1, 30)),
    noise(5000),
    b"content 1\n" * 40,
]


def _path(ref: BlobRef) -> str:
    return layout.by_digest(layout.BLOBS, ref.digest)


def _named(refs: list[BlobRef]) -> list[tuple[BlobRef, str]]:
    return [(ref, f"number {number}") for number, ref in enumerate(refs)]


def test_many_contents_come_back_in_their_order(store: Store) -> None:
    refs = store.put_blobs(CONTENTS)
    assert {ref.encoding for ref in refs} == {"identity", "zstd"}
    assert refs == [store.put_blob(content) for content in CONTENTS]
    assert store.get_blobs(_named(refs)) == CONTENTS
    assert list(store.damage_of(_named(refs))) == []
    assert store.put_blobs([]) == []
    assert store.get_blobs([]) == []


@pytest.mark.parametrize("how", HARMS)
def test_each_damaged_one_of_many_is_named_and_hides_no_others(
    store: Store, filesystem: StoreFilesystem, how: str
) -> None:
    refs = store.put_blobs(CONTENTS)
    harmed = [3, 11, 25]
    for number in harmed:
        harm(filesystem, _path(refs[number]), how)
    found = list(store.damage_of(_named(refs)))
    assert [error.path for error in found] == [_path(refs[number]) for number in harmed]
    for number, error in zip(harmed, found, strict=True):
        assert f"(number {number})" in str(error)
        with pytest.raises(DamagedStoreError) as caught:
            store.get_blob(refs[number], f"number {number}")
        assert (str(caught.value), caught.value.reason) == (str(error), error.reason)
    with pytest.raises(DamagedStoreError) as caught:
        store.get_blobs(_named(refs))
    assert str(caught.value) == str(found[0])


def test_damaged_ones_among_many_are_set_aside_and_written_again(
    store: Store, filesystem: StoreFilesystem, caplog: pytest.LogCaptureFixture
) -> None:
    refs = store.put_blobs(CONTENTS)
    for number in (3, 11):
        harm(filesystem, _path(refs[number]), "middle byte flipped")
    filesystem.delete(_path(refs[25]))
    caplog.set_level(logging.WARNING, "graphkiln")
    assert store.put_blobs(CONTENTS, known={ref.digest for ref in refs}) == refs
    assert store.get_blobs(_named(refs)) == CONTENTS
    set_aside = [path for path in filesystem.names(layout.QUARANTINE) if not path.endswith(".note")]
    assert sorted(path.rpartition(".")[0].partition("/")[2] for path in set_aside) == sorted(
        _path(refs[number]) for number in (3, 11)
    )
    assert len(caplog.records) == 3
    assert [f"{_path(refs[25])} was missing" in record.getMessage() for record in caplog.records].count(True) == 1


def test_a_medium_that_fails_in_the_middle_names_the_object_and_nothing_is_asked_after_it() -> None:
    refs = Store(DictFilesystem({})).put_blobs(CONTENTS)
    for operation in ("create", "read"):
        whole = DictFilesystem({})
        if operation == "read":
            Store(whole).put_blobs(CONTENTS)
        failing = FaultyFilesystem(whole, 7, "EIO")
        with pytest.raises(StoreUnavailableError) as caught:
            if operation == "create":
                Store(failing).put_blobs(CONTENTS)
            else:
                Store(failing).get_blobs(_named(refs))
        assert [done for done, _ in failing.operations] == [operation] * 8
        assert failing.operations[-1][1] in str(caught.value)


def test_each_object_is_asked_for_once() -> None:
    filesystem = FaultyFilesystem(DictFilesystem({}))
    store = Store(filesystem)
    refs = store.put_blobs(CONTENTS)
    distinct = {_path(ref) for ref in refs}
    assert [operation for operation, _ in filesystem.operations] == ["create"] * len(distinct)
    filesystem.operations.clear()
    store.put_blobs(CONTENTS)
    assert [operation for operation, _ in filesystem.operations] == ["create"] * len(distinct) + ["read"] * len(
        distinct
    )
    filesystem.operations.clear()
    store.get_blobs(_named(refs))
    assert [operation for operation, _ in filesystem.operations] == ["read"] * len(refs)


def test_what_nobody_keeps_is_read_a_bounded_number_of_bytes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class Watched(DictFilesystem):
        def read_many(self, paths):  # type: ignore[no-untyped-def]
            asked.append(list(paths))
            return super().read_many(paths)

    store = Store(Watched({}))
    refs = store.put_blobs([noise(1000, seed) for seed in range(10)] + [noise(50_000)])
    asked.clear()
    monkeypatch.setattr(objects, "BATCH_BYTES", 3500)
    assert list(store.damage_of(_named(refs))) == []
    assert [len(paths) for paths in asked] == [3, 3, 3, 1, 1]
    assert [path for paths in asked for path in paths] == [_path(ref) for ref in refs]


def test_batches_hold_everything_once_and_no_more_than_they_may() -> None:
    limit = objects.BATCH_BYTES
    sizes = [0, limit, 1, limit - 1, 1, 2 * limit, 0, 5]
    assert list(in_batches(sizes, lambda size: size)) == [[0, limit], [1, limit - 1], [1], [2 * limit], [0, 5]]
    assert list(in_batches([], len)) == []


def test_results_are_the_same_together_and_one_by_one(filesystem: StoreFilesystem) -> None:
    store = Store(filesystem)
    complete = make_complete(store)
    keys = [graph.key for graph in complete.plan.graphs]
    unknown = digest_bytes(b"never compiled")
    results = usable_results(store, [*keys, unknown, keys[0]])
    assert list(results) == [*keys, unknown]
    assert results[unknown] is None
    assert all(results[key] is not None and results[key] == usable_result(store, key) for key in keys)


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("what", ["action", "executable", "log"])
def test_a_damaged_result_is_mended_and_hides_no_other(filesystem: StoreFilesystem, what: str, how: str) -> None:
    store = Store(filesystem)
    complete = make_complete(store)
    path = complete.paths["log" if what == "log" else f"{FORWARD} {what}"]
    forward, other = (graph.key for graph in complete.plan.graphs)
    before = usable_results(store, [forward, other])
    harm(filesystem, path, how)
    after = usable_results(store, [forward, other])
    assert after[other] == before[other]
    kept, whole = after[forward], before[forward]
    assert whole is not None
    assert kept == (msgspec.structs.replace(whole, log=None) if what == "log" else None)
    assert after == usable_results(store, [forward, other])
