"""One thread that watches all running jobs and ends those which go past a limit."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from graphkiln.tasks.sandbox.child import Child
from graphkiln.tasks.sandbox.limits import Limits
from graphkiln.tasks.sandbox.tree import ProcessTable, resident_bytes

Verdict: TypeAlias = Literal["timeout", "out-of-memory", "log-flood"]

_TICK_SECONDS = 0.1
# Where a look at all processes is dear (thousands of them, or large shared memories), looks become rarer, so that
# they take no more than a tenth of one core.
_IDLE_PER_BUSY = 9.0


class Watch:
    """A running job as the monitor sees it.

    Attributes:
        started: the clock's reading when the job was handed over.
        peak_memory_bytes: most memory seen so far.
        verdict: the limit for which the job was ended, if it was.
    """

    def __init__(self, child: Child, log: Path, started: float) -> None:
        self.child = child
        self.log = log
        self.started = started
        self.peak_memory_bytes = 0
        self.verdict: Verdict | None = None


class Monitor:
    """Watches jobs in a thread of its own, which lives until `close`."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()
        self._watches: set[Watch] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="graphkiln-monitor", daemon=True)
        self._thread.start()

    def watch(self, child: Child, log: Path) -> Watch:
        """Begin to watch a job.

        Raises:
            RuntimeError: the monitor has ended, so that no limit would be kept.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("the monitor of child processes has ended")
            watch = Watch(child, log, self._clock())
            self._watches.add(watch)
            self._changed.notify()
        return watch

    def finish(self, watch: Watch) -> float:
        """Stop watching; from now on the verdict of `watch` stays as it is. Return how long the job took, in seconds.

        May be called more than once.
        """
        with self._changed:
            self._watches.discard(watch)
            return self._clock() - watch.started

    def close(self) -> None:
        """End the thread, and all jobs that are still watched."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while watches := self._next():
                begun = time.monotonic()
                table = ProcessTable()
                for watch in watches:
                    self._look(watch, table)
                self._pause(max(_TICK_SECONDS, _IDLE_PER_BUSY * (time.monotonic() - begun)))
        finally:
            # Whatever ends this thread, no job goes on without limits.
            with self._changed:
                self._closed = True
                watches = list(self._watches)
            for watch in watches:
                watch.child.kill()

    def _next(self) -> list[Watch]:
        """Wait for jobs; return none once the monitor is closed."""
        with self._changed:
            while not self._watches and not self._closed:
                self._changed.wait()
            return [] if self._closed else list(self._watches)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if not self._closed:
                self._changed.wait(seconds)

    def _look(self, watch: Watch, table: ProcessTable) -> None:
        child = watch.child
        # A descendant that holds the socket would keep the end of a dead child from being noticed by its reader.
        gone = child.has_exited()
        if not gone:
            child.tree = table.tree(child.pid)
            watch.peak_memory_bytes = max(watch.peak_memory_bytes, resident_bytes(child.tree, watch.peak_memory_bytes))
        verdict = None if gone else self._verdict(watch)
        with self._changed:
            if watch not in self._watches:
                return
            watch.verdict = watch.verdict or verdict
        if gone or verdict is not None:
            child.kill()

    def _verdict(self, watch: Watch) -> Verdict | None:
        if watch.peak_memory_bytes > self._limits.memory_bytes:
            return "out-of-memory"
        if _size(watch.log) > self._limits.log_bytes:
            return "log-flood"
        if self._clock() - watch.started > self._limits.seconds:
            return "timeout"
        return None


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0
