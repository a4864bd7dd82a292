"""One job of one child: the order goes out, an answer or the child's end comes back."""

import os
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from graphkiln.tasks.sandbox.child import Child
from graphkiln.tasks.sandbox.limits import MIB, Limits
from graphkiln.tasks.sandbox.monitor import Monitor, Verdict, Watch
from graphkiln.tasks.sandbox.outcome import (
    ChildBadInputError,
    ChildFailedError,
    ChildResult,
    FailureReason,
    Usage,
    read_log,
)
from graphkiln.tasks.sandbox.protocol import (
    Answer,
    Compiled,
    Failed,
    Order,
    Parsed,
    ProtocolError,
    Started,
    receive,
    send,
)

ValueT = TypeVar("ValueT")

Decode = Callable[[Parsed | Compiled, list[bytes]], ValueT]

_EXIT_SECONDS = 1.0
_WAKE_MS = 1000
# With less than this left, a log or a temporary file cannot be written.
_FULL_BYTES = 64 * 1024


class ChildGoneError(Exception):
    """A child that was used before had ended when the job came, so that nothing of the job has happened."""


class Job:
    """A job that a child is to do.

    Args:
        child: who does it. It is ended if the job fails in any way but by an error of the adapter.
        log: an empty file.
        limits: what it may use; kept by `monitor`.
    """

    def __init__(self, child: Child, log: Path, limits: Limits, monitor: Monitor) -> None:
        self._child = child
        self._log = log
        self._limits = limits
        self._monitor = monitor
        self._started = False
        self.clean = False

    def run(self, order: Order, blobs: Sequence[bytes], decode: Decode[ValueT]) -> ChildResult[ValueT]:
        """Have the job done. Afterwards `clean` says whether the child can do another one.

        Raises:
            ChildBadInputError: the adapter raised `BadInputError`.
            ChildFailedError: the job failed in any other way.
            ChildGoneError: see there.
        """
        watch = self._monitor.watch(self._child, self._log)
        answer: Answer | None = None
        fault = ""
        try:
            send(self._child.channel, order, blobs)
            self._expect_start()
            answer, outputs = self._expect_answer()
            if not isinstance(answer.result, Failed):
                value = decode(answer.result, outputs)
        except ProtocolError as error:
            answer, fault = None, f"gave an answer that cannot be read: {error}"
        except (OSError, EOFError):
            pass  # the child has gone; why is found out below
        finally:
            seconds = self._monitor.finish(watch)
        if answer is None or watch.verdict is not None:
            raise self._ending(watch, seconds, fault)
        log, flooded = read_log(self._log, self._limits.log_bytes)
        usage = Usage(log, seconds, max(watch.peak_memory_bytes, answer.peak_memory_bytes))
        if flooded:
            raise ChildFailedError(self._exceeded("log-flood", usage), reason="log-flood", usage=usage)
        if isinstance(answer.result, Failed):
            raise _adapter_error(answer.result, usage)
        self.clean = answer.clean
        self._child.used = True
        return ChildResult(usage.log, usage.seconds, usage.peak_memory_bytes, value)

    def _expect_start(self) -> None:
        message, _ = self._receive()
        if not isinstance(message, Started):
            raise ProtocolError(f"{type(message).__name__} came before the start")
        self._started = True

    def _expect_answer(self) -> tuple[Answer, list[bytes]]:
        message, outputs = self._receive()
        if not isinstance(message, Answer):
            raise ProtocolError(f"{type(message).__name__} is no answer")
        return message, outputs

    def _receive(self) -> tuple[object, list[bytes]]:
        poller = select.poll()
        poller.register(self._child.channel, select.POLLIN)
        # Python code runs from time to time, so that an exception which another thread raises in this one (as
        # Prefect does to cancel a task) is seen.
        while not poller.poll(_WAKE_MS):
            pass
        # An honest child cannot hold more than its memory limit.
        return receive(self._child.channel, self._limits.memory_bytes)

    def _ending(self, watch: Watch, seconds: float, fault: str) -> Exception:
        """End the child and say what it died of."""
        by_itself = watch.verdict is None and not fault and self._child.exits_within(_EXIT_SECONDS)
        # Its temporary files go below, and then there is room again.
        full = by_itself and _is_full(self._child.folder)
        self._child.kill()
        log, _ = read_log(self._log, self._limits.log_bytes)
        if not self._started:
            log += self._child.start_log.read_bytes()
        usage = Usage(log, seconds, watch.peak_memory_bytes)
        code = self._child.end()
        if watch.verdict is not None:
            return ChildFailedError(self._exceeded(watch.verdict, usage), reason=watch.verdict, usage=usage)
        if by_itself and not self._started and self._child.used:
            return ChildGoneError("the child had ended before the job")
        message, reason = _death(code) if by_itself else (f"the child {fault or 'closed its connection'}", "crashed")
        if full and reason == "crashed":
            message = f"the disk that holds the temporary files ({self._child.folder.parent}) is full: {message}"
            reason = "disk-full"
        return ChildFailedError(message, reason=reason, usage=usage)

    def _exceeded(self, verdict: Verdict, usage: Usage) -> str:
        limits = self._limits
        match verdict:
            case "timeout":
                return f"it was ended because it took longer than the limit of {limits.seconds:g} s"
            case "out-of-memory":
                return (
                    f"it was ended because its processes used {usage.peak_memory_bytes / MIB:.0f} MiB of memory, more "
                    f"than the limit of {limits.memory_bytes / MIB:.0f} MiB"
                )
            case "log-flood":
                return f"it was ended because its log grew past the limit of {limits.log_bytes / MIB:g} MiB"


def _is_full(folder: Path) -> bool:
    """Tell whether the file system of a folder has no room left, or no files."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize < _FULL_BYTES or (system.f_files > 0 and system.f_favail == 0)


def _adapter_error(failed: Failed, usage: Usage) -> ChildBadInputError | ChildFailedError:
    if failed.kind == "bad-input":
        return ChildBadInputError(failed.message, reason=failed.reason, log=usage.log)
    return ChildFailedError(failed.message, reason=failed.kind, usage=usage)


def _death(code: int | None) -> tuple[str, FailureReason]:
    if code is None or code >= 0:
        return f"the child ended with exit code {code} and no answer", "crashed"
    if code == -signal.SIGKILL:
        return "the child was killed from outside (SIGKILL), as the system does when memory runs short", "killed"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the child crashed with {name} ({signal.strsignal(-code)}); its log may say where", "crashed"
