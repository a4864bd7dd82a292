"""A run's rows in the catalogue: one for each kernel graph that was wanted."""

import logging
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime

from graphkiln.storage.catalog import CatalogRow, write_part
from graphkiln.storage.records import Plan, PlannedGraph
from graphkiln.storage.store import Store
from graphkiln.tasks.outcome import GraphOutcome

_log = logging.getLogger("graphkiln")


def record_run(plan: Plan, outcomes: Mapping[str, GraphOutcome], store: Store) -> None:
    """Write what became of each kernel graph to the catalogue. If that fails, a warning is all that comes of it.

    Args:
        plan: the plan.
        outcomes: what became of its kernel graphs, by name. Those of other ranks may be missing.
        store: the store.
    """
    now, run = datetime.now(UTC), secrets.token_bytes(16)
    rows = [_row(now, run, plan, graph, outcomes[graph.name]) for graph in plan.graphs if graph.name in outcomes]
    try:
        write_part(store, rows)
    except Exception as error:  # noqa: BLE001  # whatever it is, the run has come to its end and must not fail
        _log.warning("the run could not be written to the catalogue, and reports will lack it: %s", error)


def _row(now: datetime, run: bytes, plan: Plan, graph: PlannedGraph, outcome: GraphOutcome) -> CatalogRow:
    return CatalogRow(
        time=now,
        run=run,
        network=plan.network.name,
        target=plan.target.name,
        variant=plan.variant,
        kernel_graph=graph.name,
        ranks=outcome.ranks,
        rank_count=len(graph.ranks),
        outcome=outcome.state,
        action_key=outcome.key,
        artifact=outcome.artifact,
        bytes=outcome.bytes,
        stored_bytes=outcome.stored_bytes,
        compile_seconds=outcome.seconds,
        peak_memory_bytes=outcome.peak_memory_bytes,
        host=outcome.host,
        compiled_at=outcome.compiled_at,
    )
