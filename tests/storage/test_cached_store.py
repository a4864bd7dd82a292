"""A store whose readers may use the copies of this host: who reads what, and what is never believed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.locations import open_filesystem
from graphkiln.storage.node_cache import NodeCache
from graphkiln.storage.objects import NodeCacheUse
from graphkiln.storage.results import manifest_of, usable_result
from graphkiln.storage.store import Store, open_for_writing, open_store
from tests.storage.faults import DictFilesystem
from tests.storage.samples import FORWARD, HARMS, NOW, OUTPUTS, harm, make_complete, noise

SHORT_AND_LONG = pytest.mark.parametrize(
    "content", [b"short", b"long " * 5000, noise(9000)], ids=["short", "zstd", "noise"]
)
USES: tuple[NodeCacheUse, ...] = get_args(NodeCacheUse)


@pytest.fixture
def filesystem() -> StoreFilesystem:
    return DictFilesystem({})


@pytest.fixture
def store(filesystem: StoreFilesystem, tmp_path: Path) -> Store:
    return Store(filesystem, lambda: NOW, node_cache=NodeCache(tmp_path / "node", 10**9))


def copies(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "node").glob("??/*")}


@SHORT_AND_LONG
def test_only_readers_that_say_so_use_copies_or_leave_them(
    store: Store, filesystem: StoreFilesystem, tmp_path: Path, content: bytes
) -> None:
    ref = store.put_blob(content)
    path = layout.by_digest(layout.BLOBS, ref.digest)
    assert store.get_blob(ref, "a blob") == content
    assert copies(tmp_path) == set()
    assert store.get_blob(ref, "a blob", node_cache="fill") == content
    assert copies(tmp_path) == {ref.digest}
    filesystem.delete(path)
    assert store.get_blob(ref, "a blob", node_cache="use") == content
    for use in ("bypass", "fill"):
        with pytest.raises(DamagedStoreError, match="is missing") as caught:
            store.get_blob(ref, "a blob", node_cache=use)
        assert (caught.value.reason, caught.value.path) == ("missing", path)


@SHORT_AND_LONG
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("how", HARMS)
def test_damage_in_the_store_is_told_alike_and_leaves_no_copy(
    store: Store, filesystem: StoreFilesystem, tmp_path: Path, content: bytes, use: NodeCacheUse, how: str
) -> None:
    ref = store.put_blob(content)
    path = layout.by_digest(layout.BLOBS, ref.digest)
    harm(filesystem, path, how)
    with pytest.raises(DamagedStoreError) as expected:
        Store(filesystem).get_blob(ref, "the payload of forward")
    with pytest.raises(DamagedStoreError) as caught:
        store.get_blob(ref, "the payload of forward", node_cache=use)
    assert str(caught.value) == str(expected.value)
    assert (caught.value.reason, caught.value.path) == (expected.value.reason, path)
    assert copies(tmp_path) == set()
    assert store.put_blob(content) == ref
    assert store.get_blob(ref, "a blob", node_cache=use) == content


@pytest.mark.parametrize("use", USES)
def test_a_reference_that_asks_for_another_content_of_a_copy_gets_none(
    store: Store, tmp_path: Path, use: NodeCacheUse
) -> None:
    ref = store.put_blob(b"content")
    store.get_blob(ref, "a blob", node_cache="fill")
    assert copies(tmp_path) == {ref.digest}
    other = digest_bytes(b"other")
    for change in ({"content_digest": other}, {"size": 6}, {"stored_size": 8}, {"encoding": "zstd"}):
        changes: dict[str, Any] = change
        with pytest.raises(DamagedStoreError):
            store.get_blob(msgspec.structs.replace(ref, **changes), "a blob", node_cache=use)
    assert store.get_blob(ref, "a blob", node_cache=use) == b"content"


def test_many_blobs_come_from_copies_and_from_the_store(store: Store, filesystem: StoreFilesystem) -> None:
    contents = [noise(100 * number, number) for number in range(1, 9)]
    refs = store.put_blobs(contents)
    store.get_blobs([(ref, "a blob") for ref in refs[::2]], node_cache="use")
    for ref in refs[::2]:
        filesystem.delete(layout.by_digest(layout.BLOBS, ref.digest))
    wanted = [(ref, "a blob") for ref in [*refs, refs[0]]]
    assert store.get_blobs(wanted, node_cache="use") == [*contents, contents[0]]
    with pytest.raises(DamagedStoreError, match="missing"):
        store.get_blobs(wanted, node_cache="fill")


def test_a_manifest_comes_from_a_copy_only_for_those_who_say_so(store: Store, filesystem: StoreFilesystem) -> None:
    complete = make_complete(store)
    ref = store.read_ref(*complete.variant)
    assert ref is not None
    whole = manifest_of(store, ref, node_cache="use")
    harm(filesystem, complete.paths["manifest"], "deleted")
    assert manifest_of(store, ref, node_cache="use") == whole
    reads: list[Callable[[], object]] = [
        lambda: manifest_of(store, ref),
        lambda: store.read_manifest(ref.manifest, node_cache="fill"),
    ]
    for read in reads:
        with pytest.raises(DamagedStoreError, match="is missing"):
            read()
    assert not store.holds_manifest(whole)


def test_a_result_is_looked_up_in_the_store_and_leaves_copies(
    store: Store, filesystem: StoreFilesystem, tmp_path: Path
) -> None:
    complete = make_complete(store)
    key = next(graph.key for graph in complete.plan.graphs if graph.name == FORWARD)
    result = usable_result(store, key)
    assert result is not None
    assert {ref.digest for ref in result.outputs.values()} <= copies(tmp_path)
    outputs = {name: store.get_blob(ref, name, node_cache="use") for name, ref in result.outputs.items()}
    assert outputs == OUTPUTS[FORWARD]
    lost: BlobRef = next(iter(result.outputs.values()))
    filesystem.delete(layout.by_digest(layout.BLOBS, lost.digest))
    assert usable_result(store, key) is None
    assert store.read_action(key) is None


@pytest.mark.parametrize("url", ["local", "file", "memory"])
def test_a_store_that_is_near_has_no_copies(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_NODE_CACHE", "s3://no/such")
    place = {"local": str(tmp_path / "store"), "file": f"file://{tmp_path}/store", "memory": f"memory://{tmp_path}"}[
        url
    ]
    store = open_for_writing(place)
    assert store._node_cache is None
    ref = store.put_blob(b"content")
    assert open_store(place).get_blob(ref, "a blob", node_cache="use") == b"content"
    assert open_filesystem(place).url == store.url
