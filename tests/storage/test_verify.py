from collections.abc import Iterator

import pytest

from graphkiln.storage import layout
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import BadInputError, StoreUnavailableError
from graphkiln.storage.filesystem import Entry, StoreFilesystem
from graphkiln.storage.local import TEMPORARY_PREFIX
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import FaultyFilesystem
from tests.storage.samples import HARMS, Complete, flipped, harm, make_complete, overwrite, plan_of, ref_of

OTHER = digest_bytes(b"other")

# A store cannot know that these were there once.
UNNOTICED_IF_DELETED = ["failure"]


@pytest.fixture
def complete(store: Store) -> Complete:
    return make_complete(store)


def _damage(store: Store) -> list[str]:
    return [problem.path for problem in verify_store(store).problems if problem.severity == "damage"]


def _leftovers(store: Store) -> list[str]:
    return [problem.path for problem in verify_store(store).problems if problem.severity == "leftover"]


def test_a_store_in_order_has_no_problems(store: Store, complete: Complete) -> None:
    found = verify_store(store)
    assert found.problems == ()
    assert not found.damaged
    assert found.committed == 1
    assert found.objects == len(set(complete.paths.values())) == len(list(store.names("")))


def test_an_empty_store_has_no_problems(store: Store) -> None:
    assert verify_store(store).problems == ()
    assert verify_store(store).objects == 0


@pytest.mark.parametrize("how", HARMS)
def test_each_object_that_is_harmed_is_reported_and_nothing_else(
    store: Store, filesystem: StoreFilesystem, complete: Complete, how: str
) -> None:
    for what, path in complete.paths.items():
        was = harm(filesystem, path, how)
        found = verify_store(store)
        if how == "deleted" and what in UNNOTICED_IF_DELETED:
            assert found.problems == ()
        elif how == "deleted" and what == "ref":
            assert [(problem.path, problem.severity) for problem in found.problems] == [(path, "leftover")]
        else:
            assert [(problem.path, problem.severity) for problem in found.problems] == [(path, "damage")], what
            assert found.damaged
            assert f"{store.url}/{path}" in found.problems[0].message
        filesystem.delete(path)
        filesystem.create(path, was)
    assert verify_store(store).problems == ()


def test_a_flipped_byte_anywhere_is_reported(store: Store, filesystem: StoreFilesystem, complete: Complete) -> None:
    for path in complete.paths.values():
        was = filesystem.read(path)
        for position in range(0, len(was), max(1, len(was) // 7)):
            overwrite(filesystem, path, flipped(was, position, 0x20))
            assert _damage(store) == [path]
        overwrite(filesystem, path, was)


def test_all_that_is_harmed_at_once_is_reported(store: Store, filesystem: StoreFilesystem, complete: Complete) -> None:
    for path in complete.paths.values():
        harm(filesystem, path, "cut in half")
    assert _damage(store) == sorted(set(complete.paths.values()))


def test_verifying_changes_nothing(store: Store, filesystem: StoreFilesystem, complete: Complete) -> None:
    harm(filesystem, complete.paths["forward executable"], "middle byte flipped")
    harm(filesystem, complete.paths["ref"], "emptied")
    before = {path: filesystem.read(path) for path in filesystem.names("")}
    verify_store(store)
    assert {path: filesystem.read(path) for path in filesystem.names("")} == before


def test_what_is_in_the_wrong_place_is_reported(store: Store, filesystem: StoreFilesystem, complete: Complete) -> None:
    wrong = {
        layout.by_digest(layout.ACTIONS, OTHER): "forward action",
        layout.by_digest(layout.FAILURES, OTHER): "failure",
        layout.by_digest(layout.BLOBS, OTHER): "forward payload",
        layout.by_digest(layout.MANIFESTS, OTHER): "manifest",
        layout.by_variant(layout.REFS, "toy", "host", OTHER): "ref",
        layout.by_variant(layout.PLANS, "another", "host", complete.plan.variant): "plan",
    }
    for path, what in wrong.items():
        filesystem.create(path, filesystem.read(complete.paths[what]))
    assert _damage(store) == sorted(wrong)


def test_a_ref_to_the_manifest_of_another_variant_is_reported(store: Store, complete: Complete) -> None:
    plan = plan_of({}, network="another")
    store.write_ref(ref_of(plan, complete.manifest))
    assert _damage(store) == [layout.by_variant(layout.REFS, "another", "host", plan.variant)]


def test_what_killed_runs_and_others_left_is_no_damage(
    store: Store, filesystem: StoreFilesystem, complete: Complete
) -> None:
    left = [
        f"{TEMPORARY_PREFIX}1",
        f"{layout.BLOBS}/ab/{TEMPORARY_PREFIX}2",
        f"{layout.BLOBS}/ab/{OTHER}",
        f"{layout.BLOBS}/{OTHER}",
        f"{layout.REFS}/.snapshot/host/{OTHER}",
        f"{layout.REFS}/toy/host/more/{OTHER}",
        f"{layout.PLANS}/toy/.nfs0001/{OTHER}",
        "README.txt",
        "unknown/folder/x",
    ]
    for path in left:
        filesystem.create(path, b"")
    assert _leftovers(store) == sorted(left)
    assert _damage(store) == []


def test_quarantined_objects_are_leftovers_that_say_why(
    store: Store, filesystem: StoreFilesystem, complete: Complete
) -> None:
    harm(filesystem, complete.paths["failure"], "first byte flipped")
    store.mend(lambda: store.read_failure(complete.failed_key))
    kept, note = filesystem.names(layout.QUARANTINE)
    (problem,) = verify_store(store).problems
    assert (problem.path, problem.severity) == (note, "leftover")
    assert "2026-01-02" in problem.message
    assert "is damaged" in problem.message
    for how in HARMS:
        was = harm(filesystem, note, how)
        assert _leftovers(store) == ([] if how == "deleted" else [note])
        assert _damage(store) == []
        filesystem.delete(note)
        filesystem.create(note, was)
    filesystem.delete(kept)
    assert _damage(store) == []


class Vanishing(FaultyFilesystem):
    """A file system whose objects are taken away by somebody else between being listed and being read."""

    def __init__(self, inner: StoreFilesystem, path: str) -> None:
        super().__init__(inner)
        self._path = path

    def entries(self, folder: str) -> Iterator[Entry]:
        listed = list(super().entries(folder))
        self._inner.delete(self._path)
        return iter(listed)


def test_an_object_that_vanishes_meanwhile_is_no_crash(filesystem: StoreFilesystem) -> None:
    complete = make_complete(Store(filesystem))
    harm(filesystem, complete.paths["failure"], "emptied")
    Store(filesystem).mend(lambda: Store(filesystem).read_failure(complete.failed_key))
    before = {path: filesystem.read(path) for path in filesystem.names("")}
    for path, data in before.items():
        verify_store(Store(Vanishing(filesystem, path)))
        filesystem.create(path, data)


def test_a_medium_that_fails_is_an_error_and_not_damage(store: Store, complete: Complete) -> None:
    class Broken(Vanishing):
        def read(self, path: str) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(StoreUnavailableError):
        verify_store(Store(Broken(store._fs, "none")))


def test_a_newer_store_is_not_verified(store: Store, filesystem: StoreFilesystem, complete: Complete) -> None:
    from graphkiln.storage.documents import seal
    from graphkiln.storage.records import StoreFormat

    overwrite(filesystem, layout.FORMAT, seal("store format", StoreFormat(2, "blake3")))
    with pytest.raises(BadInputError, match="upgrade"):
        verify_store(store)
