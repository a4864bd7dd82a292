"""Pure facts about plans: what a variant and an action key are made of, and how two plans differ."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from graphkiln.storage.canonical import Json
from graphkiln.storage.digests import Digest
from graphkiln.storage.keys import KeyPart, PartChange, action_key, changed_parts
from graphkiln.storage.ranks import RankSet
from graphkiln.storage.records import NetworkRecord, Plan, PlannedGraph, TargetRecord

FRONTEND_PREFIX, BACKEND_PREFIX = "frontend.", "backend."


def toolchain(frontend: Iterable[KeyPart], backend: Iterable[KeyPart]) -> tuple[KeyPart, ...]:
    """Return the fingerprints of both adapters as one list of parts, each under its adapter's prefix."""
    return tuple(
        msgspec.structs.replace(part, name=prefix + part.name)
        for prefix, parts in ((FRONTEND_PREFIX, frontend), (BACKEND_PREFIX, backend))
        for part in parts
    )


def variant_digest(network: NetworkRecord, target: TargetRecord, tools: Sequence[KeyPart]) -> Digest:
    """Return the variant: the digest of resolved parameters, resolved target and toolchain."""
    return action_key([KeyPart.json("parameters", dict(network.parameters)), *_target_parts(target), *tools])


def compile_parts(
    target: TargetRecord, tools: Sequence[KeyPart], payload: Digest, payload_format: str
) -> tuple[KeyPart, ...]:
    """Return everything that the artifact of a kernel graph depends on.

    Args:
        target: the resolved target.
        tools: the toolchain; the frontend's part of it does not count, as the payload stands for what it did.
        payload: digest of the payload's content.
        payload_format: the payload's encoding.
    """
    return (
        KeyPart.text("stage", "compile_kernel_graph"),
        KeyPart.text("payload.format", payload_format),
        KeyPart.digest("payload", payload),
        *_target_parts(target),
        *(part for part in tools if part.name.startswith(BACKEND_PREFIX)),
    )


def parts_of(plan: Plan, graph: PlannedGraph) -> tuple[KeyPart, ...]:
    """Return the key parts of one of a plan's kernel graphs."""
    return compile_parts(plan.target, plan.toolchain, graph.payload.content_digest, graph.payload_format)


def distinct_graphs(graphs: Iterable[PlannedGraph]) -> dict[Digest, list[PlannedGraph]]:
    """Return the kernel graphs by action key: those that share one are compiled once."""
    found: dict[Digest, list[PlannedGraph]] = {}
    for graph in graphs:
        found.setdefault(graph.key, []).append(graph)
    return found


def graphs_of_ranks(plan: Plan, ranks: RankSet | None) -> list[PlannedGraph]:
    """Return the kernel graphs that these ranks run; all of them if None."""
    return [graph for graph in plan.graphs if ranks is None or graph.ranks.meets(ranks)]


def key_changes(before: Plan, after: Plan, graph: str) -> list[PartChange] | None:
    """Return which key parts of a kernel graph differ between two plans; None if `before` has no such graph."""
    old = next((item for item in before.graphs if item.name == graph), None)
    new = next(item for item in after.graphs if item.name == graph)
    return None if old is None else changed_parts(parts_of(before, old), parts_of(after, new))


def _target_parts(target: TargetRecord) -> list[KeyPart]:
    settings: Mapping[str, Json] = target.settings
    return [
        KeyPart.text("backend", target.backend),
        *(KeyPart.json(f"target.{name}", value) for name, value in sorted(settings.items())),
    ]
