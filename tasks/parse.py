"""Stage 1, after the frontend has run: its payloads and the plan that names them are stored."""

from collections.abc import Sequence
from datetime import UTC, datetime

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.documents import seal
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.keys import action_key
from graphkiln.storage.plans import compile_parts, graphs_of_ranks
from graphkiln.storage.ranks import RankSet
from graphkiln.storage.records import Plan, PlanDocument, PlannedGraph
from graphkiln.storage.store import Store
from graphkiln.tasks.contracts import KernelGraph
from graphkiln.tasks.resolve import ResolvedNetwork


def store_plan(resolved: ResolvedNetwork, parsed: Sequence[KernelGraph], store: Store) -> Plan:
    """Store the payloads of a frontend run and the plan that names them.

    Raises:
        BadInputError: the backend cannot take these payloads, or two kernel graphs share a name.
    """
    _check_graphs(resolved, parsed)
    current = store.mend(lambda: store.read_plan(resolved.network.name, resolved.target.name, resolved.variant))
    known = {graph.payload.digest for graph in current.plan.graphs} if current else set()
    graphs = []
    payloads = store.put_blobs([graph.payload for graph in parsed], known=known)
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
    plan = Plan(
        network=resolved.network,
        target=resolved.target,
        variant=resolved.variant,
        toolchain=resolved.toolchain,
        graphs=tuple(graphs),
    )
    _write_plan(plan, current, store)
    return plan


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


def _write_plan(plan: Plan, current: PlanDocument | None, store: Store) -> None:
    previous: BlobRef | None = None
    if current is not None:
        previous = current.previous if current.plan == plan else store.put_blob(seal("plan", current))
        kept = previous
        if kept is not None and store.mend(lambda: store.get_blob(kept, f"the plan before {plan.title()}")) is None:
            previous = None
        if current.plan == plan and current.previous == previous:
            return
    store.write_plan(PlanDocument(plan=plan, created_at=datetime.now(UTC), previous=previous))


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
