"""What became of a kernel graph in one run."""

from typing import Literal

import msgspec

from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import CompileFailedError, GraphKilnError
from graphkiln.storage.records import ActionResult, FailureRecord, PlannedGraph

State = Literal["compiled", "cached", "failed", "blocked"]


class GraphOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one kernel graph in one run.

    Attributes:
        name: the kernel graph.
        ranks: who runs it, such as ``"0-15"``.
        state: ``"compiled"`` now, ``"cached"`` from before, ``"failed"``, or ``"blocked"``: not attempted.
        key: its action key.
        seconds: wall time of the compile that made the artifact, whenever that was.
        bytes: size of the artifact, decoded.
        reason: why it failed, in one word; None if it did not.
        message: why it failed, in the compiler's words; None if it did not.
        retryable: whether the failure may go away by itself.
    """

    name: str
    ranks: str
    state: State
    key: Digest
    seconds: float | None = None
    bytes: int | None = None
    reason: str | None = None
    message: str | None = None
    retryable: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether there is an artifact."""
        return self.state in ("compiled", "cached")


def outcome_of_result(graph: PlannedGraph, result: ActionResult, state: State) -> GraphOutcome:
    """Return the outcome of a kernel graph that has a result, made now or before."""
    return GraphOutcome(
        name=graph.name,
        ranks=str(graph.ranks),
        state=state,
        key=graph.key,
        seconds=result.stats.seconds,
        bytes=sum(ref.size for ref in result.outputs.values()),
    )


def outcome_of_failure(graph: PlannedGraph, error: GraphKilnError) -> GraphOutcome:
    """Return the outcome of a kernel graph that did not compile; one that was interrupted counts as blocked."""
    return GraphOutcome(
        name=graph.name,
        ranks=str(graph.ranks),
        state="blocked" if error.reason == "interrupted" else "failed",
        key=graph.key,
        reason=error.reason,
        message=str(error),
        retryable=error.retryable,
    )


def outcome_of_record(graph: PlannedGraph, failure: FailureRecord) -> GraphOutcome:
    """Return the outcome of a kernel graph that another run has tried to compile in vain."""
    error = CompileFailedError(failure.message, reason=failure.reason, retryable=failure.retryable)
    return outcome_of_failure(graph, error)


def outcome_for(graph: PlannedGraph, twin: GraphOutcome) -> GraphOutcome:
    """Return the outcome of a kernel graph that shares its action with `twin`."""
    return msgspec.structs.replace(twin, name=graph.name, ranks=str(graph.ranks))
