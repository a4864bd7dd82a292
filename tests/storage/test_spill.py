"""A disk that becomes full: this run goes on with what it compiles, and nothing in the store is half."""

import errno

import pytest

from graphkiln.storage import layout
from graphkiln.storage.errors import StoreUnavailableError
from graphkiln.storage.spill import SpillingFilesystem
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import DictFilesystem, FaultPoint, FaultyFilesystem, FullFilesystem
from tests.storage.samples import HARMS, OUTPUTS, compile_toy, harm, load_toy, make_complete

VARIANT = compile_toy(Store(DictFilesystem({}))).variant


def test_a_disk_that_becomes_full_at_any_write(caplog: pytest.LogCaptureFixture) -> None:
    room = 0
    while True:
        caplog.clear()
        disk = FullFilesystem({}, room)
        store = Store(SpillingFilesystem(disk))
        compile_toy(store)
        assert load_toy(store, VARIANT) == OUTPUTS, room
        assert not verify_store(store).damaged, room
        spilled = [record for record in caplog.records if "no space left" in record.message]
        assert not verify_store(Store(disk)).damaged, room
        if not spilled:
            break
        assert len(spilled) == 1
        assert Store(disk).variants(layout.REFS) == [], room
        disk.room = 1000
        before = dict(disk.objects)
        compile_toy(Store(disk))
        assert load_toy(Store(disk), VARIANT) == OUTPUTS, room
        # What had been kept is used.
        assert {path: data for path, data in disk.objects.items() if path in before} == before
        room += 1
    assert load_toy(Store(disk), VARIANT) == OUTPUTS
    assert room > 15


@pytest.mark.parametrize("how", HARMS)
def test_what_is_damaged_on_a_full_disk_is_made_again_in_memory(how: str) -> None:
    whole = DictFilesystem({})
    complete = make_complete(Store(whole))
    for what in set(complete.paths) - {"failure", "failure log"}:
        disk = FullFilesystem(whole.objects, 0)
        DictFilesystem.delete(disk, complete.paths[what])
        if HARMS[how] is not None:
            harmed = DictFilesystem(whole.objects)
            harm(harmed, complete.paths[what], how)
            disk.objects[complete.paths[what]] = harmed.objects[complete.paths[what]]
        before = dict(disk.objects)
        store = Store(SpillingFilesystem(disk))
        compile_toy(store)
        assert load_toy(store, VARIANT) == OUTPUTS, what
        assert {path for path in before if not path.startswith("quarantine/")} <= {*whole.objects}
        # Deletions need no space: all else on the disk is as it was.
        assert {path: data for path, data in before.items() if path in disk.objects} == disk.objects, what


def test_nothing_is_written_once_space_comes_back() -> None:
    disk = FullFilesystem({}, 0)
    filesystem = SpillingFilesystem(disk)
    assert filesystem.create("blobs/a", b"x")
    disk.room = 1000
    assert filesystem.create("blobs/b", b"x")
    assert filesystem.replace("refs/a", b"x", expected=None)
    assert list(filesystem.names("")) == ["blobs/a", "blobs/b", "refs/a"]
    assert disk.objects == {}


def test_other_faults_of_the_medium_stay_faults() -> None:
    with pytest.raises(StoreUnavailableError, match="I/O error"):
        Store(SpillingFilesystem(FaultyFilesystem(DictFilesystem({}), FaultPoint(0)))).prepare_for_writing()


def test_a_disk_that_is_found_full_as_it_is_flushed() -> None:
    class Lazy(DictFilesystem):
        """Promises space that it has not, as some network file systems do."""

        def sync(self, paths: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    disk = Lazy({})
    store = Store(SpillingFilesystem(disk))
    compile_toy(store)
    assert load_toy(store, VARIANT) == OUTPUTS
    assert Store(disk).variants(layout.REFS) == []
