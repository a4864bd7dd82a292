"""What a job gives back: a result, or an error that keeps the log."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

from graphkiln.storage.canonical import Json
from graphkiln.storage.errors import BadInputError, GraphKilnError
from graphkiln.tasks.sandbox.limits import MIB

ValueT = TypeVar("ValueT")

FailureReason: TypeAlias = Literal[
    "compiler-error",
    "timeout",
    "out-of-memory",
    "killed",
    "crashed",
    "log-flood",
    "no-output",
    "interrupted",
    "disk-full",
    "not-started",
]

_RETRYABLE: frozenset[FailureReason] = frozenset({"killed", "interrupted", "disk-full", "not-started"})
_KEPT_OF_A_FLOOD_BYTES = MIB


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One kernel graph to compile; the fields are those of `CompileRequest`, whose folder the child makes."""

    graph: str
    payload: bytes
    payload_format: str
    settings: Mapping[str, Json]


@dataclass(frozen=True)
class Usage:
    """What a job left and used.

    Attributes:
        log: what the child and its descendants wrote to their standard output and error during the job.
        seconds: wall time, from handing the job over to its answer or end.
        peak_memory_bytes: most memory that the child and its descendants had resident together, as far as seen:
            exact for the child itself, sampled about ten times a second for its descendants.
    """

    log: bytes
    seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class ChildResult(Usage, Generic[ValueT]):
    """What a job gave: `value`, and what `Usage` says."""

    value: ValueT


class ChildFailedError(GraphKilnError):
    """A job failed. Trying again may help if it was killed from outside, interrupted, or out of disk.

    Attributes:
        reason: ``compiler-error`` (the adapter raised), ``timeout``, ``out-of-memory``, ``killed`` (from outside, as
            the kernel does when memory runs short), ``crashed`` (by another signal, or ended without an answer),
            ``log-flood``, ``no-output``, ``interrupted`` (the pool was closed), ``disk-full`` or ``not-started``
            (the system refused to start a process).
        log: the log; of a flood only the head and the tail.
        seconds: see `Usage`.
        peak_memory_bytes: see `Usage`.
    """

    def __init__(self, message: str, *, reason: FailureReason, usage: Usage) -> None:
        super().__init__(message, reason=reason, retryable=reason in _RETRYABLE)
        self.log = usage.log
        self.seconds = usage.seconds
        self.peak_memory_bytes = usage.peak_memory_bytes


class ChildBadInputError(BadInputError):
    """A `BadInputError` that an adapter raised in a child: the same message and reason, and the job's log."""

    def __init__(self, message: str, *, reason: str, log: bytes) -> None:
        super().__init__(message, reason=reason)
        self.log = log


def read_log(path: Path, limit: int) -> tuple[bytes, bool]:
    """Return the log at `path`, and whether it is larger than `limit` bytes: then only its head and tail.

    A log that was never opened is empty.
    """
    if not path.exists():
        return b"", False
    with path.open("rb") as file:
        log = file.read(limit + 1)
        if len(log) <= limit:
            return log, False
        size = path.stat().st_size
        kept = min(limit // 2, _KEPT_OF_A_FLOOD_BYTES)
        file.seek(size - kept)
        note = f"\n[graphkiln: {size - 2 * kept} bytes were left out here]\n".encode()
        return log[:kept] + note + file.read(kept), True
