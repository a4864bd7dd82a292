"""What the tests of the storage layer share: records to store, a small but complete store, and ways to harm it."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef, encode
from graphkiln.storage.canonical import Json
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.keys import KeyPart, action_key
from graphkiln.storage.plans import compile_parts, parts_of, toolchain, variant_digest
from graphkiln.storage.ranks import RankSet
from graphkiln.storage.records import (
    ActionResult,
    CompileStats,
    FailureRecord,
    Manifest,
    NetworkRecord,
    Plan,
    PlanDocument,
    PlannedGraph,
    QuarantineNote,
    RefRecord,
    StoreFormat,
    TargetRecord,
)
from graphkiln.storage.results import usable_result
from graphkiln.storage.store import Store

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

NOW: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

# 10999 is one flipped byte away from 1e999, which is no number that JSON readers agree on.
STATS: Final = CompileStats(seconds=1.25, peak_memory_bytes=10999, host="host-a", finished_at=NOW)

FORWARD, BACKWARD = "forward", "backward"

# Both encodings of blobs: what repeats is compressed, what is short is kept as it is.
PAYLOADS: Final = {FORWARD: b"module @forward { }\n" * 500, BACKWARD: b"module @backward { }\n"}
OUTPUTS: Final = {
    FORWARD: {"contract": b'{"inputs": 2}', "executable": b"\x7fELF forward " * 700},
    BACKWARD: {"executable": b"\x7fELF backward"},
}
LOG: Final = b"warning: unused variable\n" * 300
FAILURE_LOG: Final = b"error: out of registers\n"
OLD_PLAN: Final = b"what the plan was before"


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def json_values(max_leaves: int = 12) -> st.SearchStrategy[Json]:
    """Everything that canonical JSON can hold."""
    leaves: st.SearchStrategy[Json] = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        text,
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
        max_leaves=max_leaves,
    )


def network_record(name: str = "toy") -> NetworkRecord:
    return NetworkRecord(name, "file", "toy.py:build", {"layers": 2}, {"layers": 2, "dropout": 0.5})


def target_record(name: str = "host") -> TargetRecord:
    return TargetRecord(name, "command", {"devices": 2}, "cpu", {"devices": 2, "features": ["avx2", "fma"]})


def plan_of(payloads: Mapping[str, BlobRef], network: str = "toy", target: str = "host") -> Plan:
    """A plan whose kernel graphs have these payloads; each runs on eight ranks of its own."""
    tools = toolchain([KeyPart.text("file.version", "1")], [KeyPart.text("command.version", "cc 12.2")])
    record = target_record(target)
    graphs = tuple(
        PlannedGraph(
            name=name,
            payload=payload,
            payload_format="text",
            ranks=RankSet.of(range(8 * index, 8 * index + 8)),
            key=action_key(compile_parts(record, tools, payload.content_digest, "text")),
        )
        for index, (name, payload) in enumerate(payloads.items())
    )
    network_of = network_record(network)
    return Plan(network_of, record, variant_digest(network_of, record, tools), tools, graphs)


def ref_of(plan: Plan, manifest: Digest) -> RefRecord:
    return RefRecord(plan.network.name, plan.target.name, plan.variant, manifest, NOW)


def result_of(plan: Plan, graph: PlannedGraph, outputs: Mapping[str, BlobRef], log: BlobRef | None) -> ActionResult:
    return ActionResult(graph.key, parts_of(plan, graph), dict(outputs), log, STATS)


def failure_of(key: Digest, reason: str, message: str, log: BlobRef | None) -> FailureRecord:
    return FailureRecord(key, FORWARD, "command", reason, reason == "timeout", message, log, STATS)


def blob_ref(content: bytes) -> BlobRef:
    digest = digest_bytes(content)
    return BlobRef(digest, "identity", len(content), digest, len(content))


def documents() -> dict[str, msgspec.Struct]:
    """One document of each kind."""
    plan = plan_of({name: blob_ref(payload) for name, payload in PAYLOADS.items()})
    artifacts = {name: {file: blob_ref(data) for file, data in files.items()} for name, files in OUTPUTS.items()}
    first = plan.graphs[0]
    return {
        "store format": StoreFormat(1, "blake3"),
        "plan": PlanDocument(plan, NOW, blob_ref(OLD_PLAN)),
        "action result": result_of(plan, first, artifacts[first.name], blob_ref(LOG)),
        "failure record": failure_of(first.key, "timeout", "ä“ \\ \n", None),
        "manifest": Manifest(plan, artifacts),
        "ref": ref_of(plan, digest_bytes(b"a manifest")),
        "quarantine note": QuarantineNote("blobs/aa/aa", "its bytes do not match its digest", NOW),
    }


# ---------------------------------------------------------------------- a small but complete store


@dataclass(frozen=True)
class Complete:
    """What `make_complete` has stored, and under which paths."""

    plan: Plan
    manifest: Digest
    paths: Mapping[str, str]  # what it is -> where it is
    failed_key: Digest

    @property
    def variant(self) -> tuple[str, str, Digest]:
        return self.plan.network.name, self.plan.target.name, self.plan.variant


def compile_toy(store: Store) -> Complete:
    """Do what a run does, in its order: blobs, plan, actions, manifest, ref. What is there already is kept."""
    store.prepare_for_writing()
    payloads = {name: store.put_blob(payload) for name, payload in PAYLOADS.items()}
    plan = plan_of(payloads)
    variant = (plan.network.name, plan.target.name, plan.variant)
    document = store.mend(lambda: store.read_plan(*variant))
    old = store.put_blob(OLD_PLAN)
    if document is None:
        store.write_plan(PlanDocument(plan, NOW, old))
    artifacts = {graph.name: dict(_compiled(store, plan, graph).outputs) for graph in plan.graphs}
    for graph in plan.graphs:
        store.get_blob(graph.payload, "a payload")
    store.sync(sorted(_named_paths(plan, artifacts)))
    manifest = store.write_manifest(Manifest(plan, artifacts))
    store.read_manifest(manifest)
    current = store.mend(lambda: store.read_ref(*variant))
    if current is None or current.manifest != manifest:
        store.write_ref(store.trust.sign_ref(store.url, ref_of(plan, manifest), after=current))
    return Complete(plan, manifest, _paths(plan, manifest, artifacts), digest_bytes(b"failed"))


def make_complete(store: Store) -> Complete:
    """A committed variant, and a failure that another one left."""
    complete = compile_toy(store)
    log = store.put_blob(FAILURE_LOG)
    store.write_failure(failure_of(complete.failed_key, "compiler-error", "no registers", log))
    failure = layout.by_digest(layout.FAILURES, complete.failed_key)
    more = {"failure": failure, "failure log": layout.by_digest(layout.BLOBS, log.digest)}
    return Complete(complete.plan, complete.manifest, {**complete.paths, **more}, complete.failed_key)


def _compiled(store: Store, plan: Plan, graph: PlannedGraph) -> ActionResult:
    found = usable_result(store, graph.key)
    if found is not None:
        return found
    outputs = {name: store.put_blob(content) for name, content in OUTPUTS[graph.name].items()}
    log = store.put_blob(LOG) if graph.name == FORWARD else None
    return store.write_action(store.trust.sign("action result", result_of(plan, graph, outputs, log)))


def _named_paths(plan: Plan, artifacts: Mapping[str, Mapping[str, BlobRef]]) -> Iterator[str]:
    for graph in plan.graphs:
        yield layout.by_digest(layout.ACTIONS, graph.key)
        yield layout.by_digest(layout.BLOBS, graph.payload.digest)
        for ref in artifacts[graph.name].values():
            yield layout.by_digest(layout.BLOBS, ref.digest)


def _paths(plan: Plan, manifest: Digest, artifacts: Mapping[str, Mapping[str, BlobRef]]) -> dict[str, str]:
    variant = (plan.network.name, plan.target.name, plan.variant)
    found = {
        "format": layout.FORMAT,
        "plan": layout.by_variant(layout.PLANS, *variant),
        "ref": layout.by_variant(layout.REFS, *variant),
        "manifest": layout.by_digest(layout.MANIFESTS, manifest),
        "log": layout.by_digest(layout.BLOBS, encoded_ref(LOG).digest),
        "old plan": layout.by_digest(layout.BLOBS, encoded_ref(OLD_PLAN).digest),
    }
    for graph in plan.graphs:
        found[f"{graph.name} action"] = layout.by_digest(layout.ACTIONS, graph.key)
        found[f"{graph.name} payload"] = layout.by_digest(layout.BLOBS, graph.payload.digest)
        for name, ref in artifacts[graph.name].items():
            found[f"{graph.name} {name}"] = layout.by_digest(layout.BLOBS, ref.digest)
    return found


def encoded_ref(content: bytes) -> BlobRef:
    return encode(content)[0]


def load_toy(store: Store, variant: tuple[str, str, Digest]) -> dict[str, dict[str, bytes]] | None:
    """Read what a trainer reads: ref, manifest, artifacts. None if nothing is committed."""
    ref = store.read_ref(*variant)
    if ref is None:
        return None
    manifest = store.read_manifest(ref.manifest)
    return {
        graph: {name: store.get_blob(blob, f"{name} of {graph}") for name, blob in outputs.items()}
        for graph, outputs in manifest.artifacts.items()
    }


# ---------------------------------------------------------------------- harm


def overwrite(filesystem: StoreFilesystem, path: str, data: bytes) -> None:
    """Put other bytes where an object is, as a broken disk does."""
    filesystem.delete(path)
    assert filesystem.create(path, data)


def flipped(data: bytes, position: int, mask: int = 0x01) -> bytes:
    changed = bytearray(data)
    changed[position] ^= mask
    return bytes(changed)


# Each turns the bytes of an object into others; None deletes it.
HARMS: Final[dict[str, Callable[[bytes], bytes] | None]] = {
    "deleted": None,
    "emptied": lambda data: b"",
    "cut in half": lambda data: data[: len(data) // 2],
    "cut by a byte": lambda data: data[:-1],
    "longer by a byte": lambda data: data + b"\0",
    "first byte flipped": lambda data: flipped(data, 0),
    "middle byte flipped": lambda data: flipped(data, len(data) // 2, 0x80),
    "last byte flipped": lambda data: flipped(data, -1, 0xFF),
    "zeroed": lambda data: bytes(len(data)),
}


def harm(filesystem: StoreFilesystem, path: str, how: str) -> bytes:
    """Harm one object and return what it was."""
    data = filesystem.read(path)
    change = HARMS[how]
    if change is None:
        filesystem.delete(path)
    else:
        overwrite(filesystem, path, change(data))
    return data


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)  # noqa: S311


def sealed(kind: str) -> bytes:
    return seal(kind, documents()[kind])
