"""Stage 2: one kernel graph becomes an artifact, or a failure record."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime

from graphkiln.storage.blobs import BlobRef, encode
from graphkiln.storage.errors import DamagedStoreError, GraphKilnError, StoreUnavailableError
from graphkiln.storage.pins import RunPin
from graphkiln.storage.plans import parts_of
from graphkiln.storage.records import ActionResult, CompileStats, FailureRecord, Plan, PlannedGraph
from graphkiln.storage.store import Store
from graphkiln.tasks.artifacts import pack
from graphkiln.tasks.outcome import GraphOutcome, outcome_of_failure, outcome_of_result
from graphkiln.tasks.sandbox.pool import ChildBadInputError, ChildFailedError, ChildPool, ChildResult, CompileJob


def compile_graph(
    plan: Plan, graph: PlannedGraph, store: Store, children: ChildPool, *, lease: str, pin: RunPin
) -> GraphOutcome:
    """Compile one kernel graph in a child process and store what came of it, pinned before it is written.

    A failure is stored as a failure record, with the token of the lease, and returned as an outcome; it is not
    raised.

    Raises:
        StoreUnavailableError: the store's medium failed.
    """
    try:
        payload = store.get_blob(graph.payload, f"the payload of {graph.name}")
        made = children.compile(plan.target.backend, _compile_job(plan, graph, payload))
        result = _store_result(plan, graph, made, store, pin)
    except StoreUnavailableError:
        raise  # the kernel graph is not at fault
    except GraphKilnError as error:
        if error.reason == "interrupted" or isinstance(error, DamagedStoreError):
            # The user's own doing, or a lost payload, says nothing of the kernel graph.
            return outcome_of_failure(graph, error)
        used = (error.seconds, error.peak_memory_bytes) if isinstance(error, ChildFailedError) else (0.0, 0)
        stats = _stats(*used)
        _store_failure(plan, graph, error, stats, store, lease, pin)
        return outcome_of_failure(graph, error, stats)
    return outcome_of_result(graph, result, "compiled")


def _compile_job(plan: Plan, graph: PlannedGraph, payload: bytes) -> CompileJob:
    return CompileJob(
        graph=graph.name, payload=payload, payload_format=graph.payload_format, settings=plan.target.settings
    )


def _store_result(
    plan: Plan, graph: PlannedGraph, made: ChildResult[dict[str, bytes]], store: Store, pin: RunPin
) -> ActionResult:
    artifact = pack(made.value)
    outputs = _put_pinned(list(artifact.values()), store, pin)
    log = _put_pinned([made.log], store, pin)[0] if made.log else None
    result = ActionResult(
        key=graph.key,
        parts=parts_of(plan, graph),
        outputs=dict(zip(artifact, outputs, strict=True)),
        log=log,
        stats=_stats(made.seconds, made.peak_memory_bytes),
    )
    result = store.write_action(store.trust.sign("action result", result))
    store.drop_failure(graph.key)
    return result


def _put_pinned(contents: Sequence[bytes], store: Store, pin: RunPin) -> list[BlobRef]:
    """Store some contents: pinned first, as one that was there before may be about to be collected."""
    encoded = [encode(content) for content in contents]
    pin.add(blobs=(ref.digest for ref, _ in encoded))
    store.put_encoded(encoded)
    return [ref for ref, _ in encoded]


def _store_failure(
    plan: Plan,
    graph: PlannedGraph,
    error: GraphKilnError,
    stats: CompileStats,
    store: Store,
    lease: str,
    pin: RunPin,
) -> None:
    log = error.log if isinstance(error, ChildFailedError | ChildBadInputError) else b""
    try:
        store.write_failure(
            FailureRecord(
                key=graph.key,
                graph=graph.name,
                backend=plan.target.backend,
                reason=error.reason,
                retryable=error.retryable,
                message=str(error),
                log=_put_pinned([log], store, pin)[0] if log else None,
                stats=stats,
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
