"""Stage 1, after the frontend has run: its payloads and the plan that names them are stored."""

from collections.abc import Sequence
from datetime import timedelta

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef, encode
from graphkiln.storage.documents import seal
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.keys import action_key
from graphkiln.storage.pins import RunPin
from graphkiln.storage.plans import compile_parts, graphs_of_ranks
from graphkiln.storage.ranks import RankSet
from graphkiln.storage.records import Plan, PlanDocument, PlannedGraph
from graphkiln.storage.store import Store
from graphkiln.tasks.contracts import KernelGraph
from graphkiln.tasks.resolve import ResolvedNetwork

# Collection asks which variants were used last; a write at each warm start would be a hot object.
_USE_IS_NOTED_AFTER = timedelta(days=1)


def store_plan(resolved: ResolvedNetwork, parsed: Sequence[KernelGraph], store: Store, pin: RunPin) -> Plan:
    """Store the payloads of a frontend run and the plan that names them.

    Everything that the plan names is pinned before anything is looked up or written.

    Raises:
        BadInputError: the backend cannot take these payloads, or two kernel graphs share a name.
    """
    _check_graphs(resolved, parsed)
    encoded = [encode(graph.payload) for graph in parsed]
    plan = _plan(resolved, parsed, [ref for ref, _ in encoded])
    pin.add(actions=(graph.key for graph in plan.graphs), blobs=(ref.digest for ref, _ in encoded))
    # Read only now: a collector that did not see the pin may have dropped it until a moment ago.
    current = store.mend(lambda: store.read_plan(resolved.network.name, resolved.target.name, resolved.variant))
    before = None if current is None or current.plan == plan else encode(seal("plan", current))
    if before is not None:
        pin.add(blobs=[before[0].digest])
    stored = [*encoded, *([before] if before else [])]
    known = {graph.payload.digest for graph in current.plan.graphs} if current else set()
    store.put_encoded(stored, known=known)
    _write_plan(plan, current, before[0] if before else None, store)
    return plan


def _plan(resolved: ResolvedNetwork, parsed: Sequence[KernelGraph], payloads: Sequence[BlobRef]) -> Plan:
    graphs = []
    for graph, payload in zip(parsed, payloads, strict=True):
        parts = compile_parts(resolved.target, resolved.toolchain, payload.content_digest, graph.payload_format)
        graphs.append(
            PlannedGraph(
                name=graph.name,
                payload=payload,
                payload_format=graph.payload_format,
                ranks=graph.ranks,
                key=action_key(parts),
            )
        )
    return Plan(
        network=resolved.network,
        target=resolved.target,
        variant=resolved.variant,
        toolchain=resolved.toolchain,
        graphs=tuple(graphs),
    )


def _check_graphs(resolved: ResolvedNetwork, parsed: Sequence[KernelGraph]) -> None:
    names: set[str] = set()
    for graph in parsed:
        layout.check_name("kernel graph", graph.name)
        if graph.name in names:
            raise BadInputError(
                f"network {resolved.network.name} has two kernel graphs named {graph.name!r}", reason="duplicate-name"
            )
        names.add(graph.name)
        if graph.payload_format not in resolved.backend.payload_formats:
            raise BadInputError(
                f"backend {resolved.target.backend} cannot compile what frontend {resolved.network.frontend} gives "
                f"(payload format {graph.payload_format}): choose another backend for target {resolved.target.name}",
                reason="payload-format",
            )
    if not names:
        raise BadInputError(f"network {resolved.network.name} has no kernel graphs", reason="no-kernel-graphs")


def _write_plan(plan: Plan, current: PlanDocument | None, before: BlobRef | None, store: Store) -> None:
    now = store.now()
    if current is None or current.plan != plan:
        store.write_plan(PlanDocument(plan=plan, created_at=now, previous=before))
        return
    kept = previous = current.previous
    if previous is not None and store.mend(lambda: store.get_blob(previous, f"the plan before {plan.title()}")) is None:
        kept = None
    used_at = current.used_at or current.created_at
    if kept != current.previous or now - used_at > _USE_IS_NOTED_AFTER:
        store.write_plan(msgspec.structs.replace(current, previous=kept, used_at=now))


def wanted_graphs(plan: Plan, ranks: RankSet | None) -> list[PlannedGraph]:
    """Return the kernel graphs that these ranks run; all of them if None.

    Raises:
        BadInputError: no kernel graph runs on any of these ranks.
    """
    graphs = graphs_of_ranks(plan, ranks)
    if not graphs:
        everyone = RankSet().union(*(graph.ranks for graph in plan.graphs))
        raise BadInputError(
            f"no kernel graph of {plan.network.name} runs on ranks {ranks}; its ranks are {everyone}",
            reason="unknown-ranks",
        )
    return graphs
