"""(large_store) The commands that look at a whole store, on one of 100,000 actions, beside reading its files."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import Row, Table
from benchmarks.workspace import Workspace

NETWORKS, GRAPHS = 1000, 100
COMMANDS = {
    "status": ("status", "--json"),
    "gc --dry-run": ("gc", "--dry-run", "--json"),
    "verify": ("verify", "--json"),
}


def measure(workspace: Workspace) -> Table:
    """Fill a store, read all of its files, and run each command once in a fresh process."""
    store = workspace.new("large_store")
    started = time.monotonic()
    objects = _fill(store)
    filled = time.monotonic() - started
    reading = _read_everything(store)
    rows = [Row(f"fill it: {objects} objects", filled)]
    for name, command in COMMANDS.items():
        seconds, megabytes = _run(workspace, store, *command)
        rows.append(Row(f"{name} ({megabytes:.0f} MB at most)", seconds, reading))
    return Table(
        f"(large_store) a store of {NETWORKS * GRAPHS:,} actions in {NETWORKS:,} networks, one round",
        ("graphkiln", "read every file"),
        rows,
    )


def _fill(folder: Path) -> int:
    """Store networks that share no kernel graph, as runs would have; return the number of objects."""
    from graphkiln.storage import layout
    from graphkiln.storage.blobs import encode
    from graphkiln.storage.digests import digest_bytes
    from graphkiln.storage.documents import seal
    from graphkiln.storage.keys import KeyPart, action_key
    from graphkiln.storage.plans import compile_parts, parts_of, variant_digest
    from graphkiln.storage.ranks import RankSet
    from graphkiln.storage.records import (
        ActionResult,
        CompileStats,
        Manifest,
        NetworkRecord,
        Plan,
        PlanDocument,
        PlannedGraph,
        RefRecord,
        TargetRecord,
    )
    from graphkiln.storage.store import open_for_writing

    store = open_for_writing(str(folder))
    target = TargetRecord("host", "command", {}, "cpu", {"features": ["avx2", "fma"]})
    tools = (KeyPart.text("backend.version", "1"), KeyPart.text("frontend.version", "1"))
    stats = CompileStats(1.0, 2**20, "host", store.now())
    for number in range(NETWORKS):
        record = NetworkRecord(f"network-{number}", "file", "k/*.c", {}, {})
        payloads = [encode(b"payload %d of %d" % (graph, number)) for graph in range(GRAPHS)]
        outputs = [encode(b"artifact %d of %d" % (graph, number)) for graph in range(GRAPHS)]
        store.put_encoded([*payloads, *outputs])
        graphs = tuple(
            PlannedGraph(
                f"graph-{graph}",
                payload,
                "text",
                RankSet.of([graph]),
                action_key(compile_parts(target, tools, payload.content_digest, "text")),
            )
            for graph, (payload, _) in enumerate(payloads)
        )
        plan = Plan(record, target, variant_digest(record, target, tools), tools, graphs)
        store.write_plan(PlanDocument(plan, store.now(), None))
        for graph, (output, _) in zip(graphs, outputs, strict=True):
            store.write_action(ActionResult(graph.key, parts_of(plan, graph), {"kernel": output}, None, stats))
        manifest = Manifest(
            plan, {graph.name: {"kernel": output} for graph, (output, _) in zip(graphs, outputs, strict=True)}
        )
        # Without the flush to the disk that a commit waits for, which is not what is measured here.
        content = seal("manifest", manifest)
        store.create(layout.by_digest(layout.MANIFESTS, digest_bytes(content)), content)
        store.write_ref(RefRecord(record.name, target.name, plan.variant, digest_bytes(content), store.now()))
    return NETWORKS * (3 * GRAPHS + 3) + 1


def _read_everything(folder: Path) -> float:
    started = time.monotonic()
    for parent, _, files in os.walk(folder):
        for name in files:
            with (Path(parent) / name).open("rb") as file:
                file.read()
    return time.monotonic() - started


def _run(workspace: Workspace, store: Path, *command: str) -> tuple[float, float]:
    """Run a command, and return its seconds and its largest resident memory in megabytes."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "graphkiln", *command, "--store", str(store)],
        env=workspace.environment(),
        stdout=subprocess.PIPE,
    )
    printed = process.stdout.read() if process.stdout else b""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    json.loads(printed)
    return time.monotonic() - started, usage.ru_maxrss / 1000
