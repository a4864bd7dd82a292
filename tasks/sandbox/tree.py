"""The processes below a child: who they are, how much memory they have, and their end."""

import logging
import os
import signal
import time
from collections.abc import Iterable

import psutil

_LOGGER = logging.getLogger(__name__)
# Each round stops what the one before has not seen yet; a stopped process cannot fork, so that few rounds do.
_KILL_ROUNDS = 10
_POLL_SECONDS = 0.002


class ProcessTable:
    """Who is whose child on this host, at one moment."""

    def __init__(self) -> None:
        self._children: dict[int, list[psutil.Process]] = {}
        self._processes: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                parent = process.ppid()
            except psutil.NoSuchProcess:
                continue
            self._processes[process.pid] = process
            self._children.setdefault(parent, []).append(process)

    def tree(self, pid: int) -> set[psutil.Process]:
        """Return the process `pid` and all its descendants; nothing if it has gone."""
        root = self._processes.get(pid)
        found = set() if root is None else {root}
        pending = [pid]
        while pending:
            for process in self._children.get(pending.pop(), ()):
                if process not in found:
                    found.add(process)
                    pending.append(process.pid)
        return found

    def session(self, sid: int) -> set[psutil.Process]:
        """Return the processes of session `sid`: they stay in it when their ancestors die, unless they leave it."""
        return {process for pid, process in self._processes.items() if _session_of(pid) == sid}

    def marked(self, name: str, value: str) -> set[psutil.Process]:
        """Return the processes that were started with this environment variable."""
        return {process for process in self._processes.values() if _variable_of(process, name) == value}


def resident_bytes(processes: Iterable[psutil.Process], peak: int) -> int:
    """Return how much memory the processes have resident together.

    A page that several of them share, as after a fork, counts once (the sum of the proportional set sizes). That is
    dear to ask the kernel for, but never more than the plain sum: it is asked for only if the plain sum is above
    `peak`, so that a result of no more than `peak` may be too high. A process alone counts with its resident set,
    shared libraries included.
    """
    plain = [size for process in processes if (size := _resident(process)) > 0]
    if len(plain) <= 1 or sum(plain) <= peak:
        return sum(plain)
    return sum(_proportional(process) for process in processes)


def kill_tree(leader: int, known: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Kill process `leader`, its session and descendants, and those of `known` that still run.

    The leader must not have been waited for yet, so that its number cannot belong to another process. Descendants
    that have left its session are found while it lives; afterwards only if they are among `known`.

    Returns:
        Those to whom the signal was sent; they may take a moment to end.
    """
    doomed = {process for process in known if process.is_running()}
    for process in doomed:
        _signal(process, signal.SIGSTOP)
    for _ in range(_KILL_ROUNDS):
        table = ProcessTable()
        found = table.session(leader).union(*(table.tree(pid) for pid in {leader, *(p.pid for p in doomed)})) - doomed
        for process in found:
            _signal(process, signal.SIGSTOP)
        doomed |= found
        if not found:
            break
    for process in doomed:
        _signal(process, signal.SIGKILL)
    return doomed


def wait_ended(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Wait until all have ended, at most so long; tell whether they have. One that nobody waited for has ended too."""
    deadline = time.monotonic() + seconds
    for process in processes:
        while _runs(process):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
    return True


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass  # it ended by itself, which is what is wanted
    except psutil.AccessDenied:
        _LOGGER.warning("process %d runs as another user and cannot be ended", process.pid)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _proportional(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0
    except psutil.AccessDenied:
        return _resident(process)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _variable_of(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1
