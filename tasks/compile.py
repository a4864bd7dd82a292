"""Stage 2: one kernel graph becomes an artifact, or a failure record."""

import platform
from datetime import UTC, datetime

from graphkiln.storage.errors import GraphKilnError, StoreUnavailableError
from graphkiln.storage.plans import parts_of
from graphkiln.storage.records import ActionResult, CompileStats, FailureRecord, Plan, PlannedGraph
from graphkiln.storage.results import usable_result
from graphkiln.storage.store import Store
from graphkiln.tasks.outcome import GraphOutcome, outcome_of_failure, outcome_of_result
from graphkiln.tasks.sandbox.pool import ChildBadInputError, ChildFailedError, ChildPool, ChildResult, CompileJob


def cached_outcome(graph: PlannedGraph, store: Store) -> GraphOutcome | None:
    """Return the outcome of a kernel graph whose verified result is in the store, else None."""
    result = usable_result(store, graph.key)
    return None if result is None else outcome_of_result(graph, result, "cached")


def compile_graph(plan: Plan, graph: PlannedGraph, store: Store, children: ChildPool, lease: str) -> GraphOutcome:
    """Compile one kernel graph in a child process and store what came of it.

    A failure is stored as a failure record, with the token of the lease, and returned as an outcome; it is not
    raised.

    Raises:
        StoreUnavailableError: the store's medium failed.
    """
    try:
        payload = store.get_blob(graph.payload, f"the payload of {graph.name}")
        made = children.compile(plan.target.backend, _compile_job(plan, graph, payload))
        result = _store_result(plan, graph, made, store)
    except StoreUnavailableError:
        raise  # the kernel graph is not at fault
    except GraphKilnError as error:
        _store_failure(plan, graph, error, store, lease)
        return outcome_of_failure(graph, error)
    return outcome_of_result(graph, result, "compiled")


def _compile_job(plan: Plan, graph: PlannedGraph, payload: bytes) -> CompileJob:
    return CompileJob(
        graph=graph.name, payload=payload, payload_format=graph.payload_format, settings=plan.target.settings
    )


def _store_result(plan: Plan, graph: PlannedGraph, made: ChildResult[dict[str, bytes]], store: Store) -> ActionResult:
    # The log last, so that it may be missing.
    refs = store.put_blobs([*made.value.values(), *([made.log] if made.log else [])])
    result = store.write_action(
        ActionResult(
            key=graph.key,
            parts=parts_of(plan, graph),
            outputs=dict(zip(made.value, refs, strict=False)),
            log=refs[-1] if made.log else None,
            stats=_stats(made.seconds, made.peak_memory_bytes),
        )
    )
    store.drop_failure(graph.key)
    return result


def _store_failure(plan: Plan, graph: PlannedGraph, error: GraphKilnError, store: Store, lease: str) -> None:
    log = error.log if isinstance(error, ChildFailedError | ChildBadInputError) else b""
    used = (error.seconds, error.peak_memory_bytes) if isinstance(error, ChildFailedError) else (0.0, 0)
    if error.reason == "interrupted":
        return  # the user's own doing says nothing of the kernel graph
    try:
        store.write_failure(
            FailureRecord(
                key=graph.key,
                graph=graph.name,
                backend=plan.target.backend,
                reason=error.reason,
                retryable=error.retryable,
                message=str(error),
                log=store.put_blob(log) if log else None,
                stats=_stats(*used),
                lease=lease,
            )
        )
    except GraphKilnError as second:
        # The store itself is at fault. The outcome still carries the first error.
        error.add_note(f"the failure record could not be stored: {second}")


def _stats(seconds: float, peak_memory_bytes: int) -> CompileStats:
    return CompileStats(
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        host=platform.node(),
        finished_at=datetime.now(UTC),
    )
