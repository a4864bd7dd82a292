"""A store with everything in it that a store can have for a committed network, and ways to damage its objects."""

import shutil
from collections.abc import Callable
from pathlib import Path

import graphkiln
from graphkiln.storage import layout
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.documents import seal
from graphkiln.storage.records import Manifest
from graphkiln.storage.store import Store, open_store
from tests.flows.cc_networks import CcNetwork, outputs_of

KERNELS = {
    "negate": "int run(int a) { return -a; }",
    "scale": '#warning "this one is slow"\nint run(int a) { return 3 * a; }',
    "shift": "int run(int a) { return a + 11; }",
}
EXPECTED_OF_7 = {"negate": -7, "scale": 21, "shift": 18}
CHANGED = "shift"
_FORMER_SHIFT = "int run(int a) { return a + 10; }"


def _flipped_at(position: Callable[[int], int]) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position(len(data))] ^= 0x01
        path.write_bytes(data)

    return flip


def _cut_to(length: Callable[[int], int]) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: length(len(data))])

    return cut


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "emptied": _cut_to(lambda _: 0),
    "cut to half": _cut_to(lambda size: size // 2),
    "last byte cut": _cut_to(lambda size: size - 1),
    "first byte flipped": _flipped_at(lambda _: 0),
    "middle byte flipped": _flipped_at(lambda size: size // 2),
    "last byte flipped": _flipped_at(lambda _: -1),
}


class Scene:
    """A network that was committed, changed in one kernel, and committed again. Its store is only ever copied.

    Attributes:
        network: the network.
        former: the network as it was before the change.
        store: the store.
        outputs: every byte of the compiled network.
        objects: the paths of its stored objects, by kind.
        former_objects: those that only the former network needs.
    """

    def __init__(self, folder: Path) -> None:
        self.network = CcNetwork(folder / "network", KERNELS)
        self.former = CcNetwork(folder / "former", {**KERNELS, CHANGED: _FORMER_SHIFT})
        # Both have one compiler, as its path is an option of the target.
        self.former.spec.write_text(self.network.spec.read_text())
        self.store = folder / "store"
        before = graphkiln.ensure(self.former.spec, store=str(self.store))
        now = graphkiln.ensure(self.network.spec, store=str(self.store))
        assert now.variant == before.variant
        assert self.network.take_runs() == sorted([*KERNELS, CHANGED])
        self.outputs = outputs_of(now)
        opened = open_store(str(self.store))
        self.objects = _objects_of(opened, now.manifest)
        known = {path for paths in self.objects.values() for path in paths}
        former = {kind: set(paths) - known for kind, paths in _objects_of(opened, before.manifest).items()}
        self.former_objects = {kind: sorted(paths) for kind, paths in former.items() if paths}

    def copy(self, folder: Path) -> Path:
        """Return a copy of the store."""
        return Path(shutil.copytree(self.store, folder))


def _objects_of(store: Store, manifest: Manifest) -> dict[str, list[str]]:
    plan = manifest.plan
    variant = (plan.network.name, plan.target.name, plan.variant)
    document = store.read_plan(*variant)
    assert document is not None
    assert document.previous is not None
    results = [store.read_action(graph.key) for graph in plan.graphs]
    blobs = {
        "plan before": [document.previous],
        "payload": [graph.payload for graph in plan.graphs],
        "artifact": [output for graph in plan.graphs for output in manifest.artifacts[graph.name].values()],
        "log": [result.log for result in results if result is not None and result.log is not None],
    }
    assert {blob.encoding for blob in blobs["artifact"]} == {"zstd"}
    assert {blob.encoding for blob in blobs["payload"]} == {"identity"}
    return {
        "store format": [layout.FORMAT],
        "ref": [layout.by_variant(layout.REFS, *variant)],
        "manifest": [layout.by_digest(layout.MANIFESTS, digest_bytes(seal("manifest", manifest)))],
        "plan": [layout.by_variant(layout.PLANS, *variant)],
        "action result": [layout.by_digest(layout.ACTIONS, graph.key) for graph in plan.graphs],
        **{kind: [layout.by_digest(layout.BLOBS, blob.digest) for blob in found] for kind, found in blobs.items()},
    }
