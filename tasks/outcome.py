"""What became of a kernel graph in one run."""

from datetime import datetime
from typing import Literal

import msgspec

from graphkiln.storage.blobs import artifact_digest
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import CompileFailedError, GraphKilnError
from graphkiln.storage.records import ActionResult, CompileStats, FailureRecord, PlannedGraph

State = Literal["compiled", "cached", "failed", "blocked"]


class GraphOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one kernel graph in one run.

    Attributes:
        name: the kernel graph.
        ranks: who runs it, such as ``"0-15"``.
        state: ``"compiled"`` now, ``"cached"`` from before, ``"failed"``, or ``"blocked"``: not attempted.
        key: its action key.
        seconds: wall time of the compile that made the artifact, whenever that was, or that failed.
        peak_memory_bytes: most memory that this compile had resident.
        host: where it ran.
        compiled_at: when it ended.
        artifact: digest of the artifact, see `graphkiln.storage.blobs.artifact_digest`.
        bytes: size of the artifact, decoded.
        stored_bytes: its size in the store.
        reason: why it failed, in one word; None if it did not.
        message: why it failed, in the compiler's words; None if it did not.
        retryable: whether the failure may go away by itself.
    """

    name: str
    ranks: str
    state: State
    key: Digest
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    host: str | None = None
    compiled_at: datetime | None = None
    artifact: Digest | None = None
    bytes: int | None = None
    stored_bytes: int | None = None
    reason: str | None = None
    message: str | None = None
    retryable: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether there is an artifact."""
        return self.state in ("compiled", "cached")


def outcome_of_result(graph: PlannedGraph, result: ActionResult, state: State) -> GraphOutcome:
    """Return the outcome of a kernel graph that has a result, made now or before."""
    outcome = GraphOutcome(
        name=graph.name,
        ranks=str(graph.ranks),
        state=state,
        key=graph.key,
        artifact=artifact_digest(result.outputs),
        bytes=sum(ref.size for ref in result.outputs.values()),
        stored_bytes=sum(ref.stored_size for ref in result.outputs.values()),
    )
    return _with_stats(outcome, result.stats)


def outcome_of_failure(graph: PlannedGraph, error: GraphKilnError, stats: CompileStats | None = None) -> GraphOutcome:
    """Return the outcome of a kernel graph that did not compile; one that was interrupted counts as blocked."""
    outcome = GraphOutcome(
        name=graph.name,
        ranks=str(graph.ranks),
        state="blocked" if error.reason == "interrupted" else "failed",
        key=graph.key,
        reason=error.reason,
        message=str(error),
        retryable=error.retryable,
    )
    return outcome if stats is None else _with_stats(outcome, stats)


def outcome_of_record(graph: PlannedGraph, failure: FailureRecord) -> GraphOutcome:
    """Return the outcome of a kernel graph that another run has tried to compile in vain."""
    error = CompileFailedError(failure.message, reason=failure.reason, retryable=failure.retryable)
    return outcome_of_failure(graph, error, failure.stats)


def outcome_for(graph: PlannedGraph, twin: GraphOutcome) -> GraphOutcome:
    """Return the outcome of a kernel graph that shares its action with `twin`."""
    return msgspec.structs.replace(twin, name=graph.name, ranks=str(graph.ranks))


def _with_stats(outcome: GraphOutcome, stats: CompileStats) -> GraphOutcome:
    return msgspec.structs.replace(
        outcome,
        seconds=stats.seconds,
        peak_memory_bytes=stats.peak_memory_bytes,
        host=stats.host,
        compiled_at=stats.finished_at,
    )
