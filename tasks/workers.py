"""The threads and child processes of one run, shared by all networks of that run.

The threads bound how many compilers work at once, whatever the number of networks and targets; each target
environment has its own children, because a child cannot change the environment that its framework has read.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from graphkiln.storage.digests import Digest
from graphkiln.storage.leases import Leases
from graphkiln.storage.pins import RunPin
from graphkiln.storage.records import VariantName
from graphkiln.storage.store import Store
from graphkiln.tasks.contracts import KernelGraph
from graphkiln.tasks.outcome import GraphOutcome
from graphkiln.tasks.resolve import ResolvedNetwork
from graphkiln.tasks.sandbox.limits import Limits
from graphkiln.tasks.sandbox.pool import ChildPool
from graphkiln.tasks.single_flight import SingleFlight

Made = TypeVar("Made")

_MOST_THREADS = 64


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Runs frontends and compilers in children, at most `jobs` at once. Close it, or use it with `with`."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or default_jobs()
        # More threads than jobs: those that wait for another run's compile must not keep a compiler from working.
        self._threads = ThreadPoolExecutor(max(self.jobs, _MOST_THREADS), thread_name_prefix="graphkiln")
        self._slots = threading.BoundedSemaphore(self.jobs)
        self._leases: dict[tuple[str, float], Leases] = {}
        self.stopping = threading.Event()
        self._pins: list[RunPin] = []
        self._lock = threading.Lock()
        self._pools: dict[tuple[object, ...], ChildPool] = {}
        self._actions: dict[Digest, Future[GraphOutcome]] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, function: Callable[[], Made]) -> Future[Made]:
        """Run a function in one of the threads."""
        return self._threads.submit(function)

    def submit_once(self, key: Digest, function: Callable[[], GraphOutcome]) -> Future[GraphOutcome]:
        """Run the function of an action in one of the threads, unless this run has started that action before."""
        with self._lock:
            if key not in self._actions:
                self._actions[key] = self._threads.submit(function)
            return self._actions[key]

    def parse(self, resolved: ResolvedNetwork) -> list[KernelGraph]:
        """Run a network's frontend in a fresh child.

        Raises:
            BadInputError: the frontend refuses the network.
            ChildFailedError: the child ended, or was ended, without an answer.
        """
        limits = Limits(seconds=resolved.limits.parse_seconds, memory_bytes=resolved.limits.memory_bytes())
        pool = self._pool({}, limits)
        return pool.parse(resolved.network.frontend, resolved.parse_request()).value

    def compilers(self, resolved: ResolvedNetwork) -> ChildPool:
        """Return the children that compile for a target."""
        limits = Limits(seconds=resolved.limits.compile_seconds, memory_bytes=resolved.limits.memory_bytes())
        return self._pool(dict(resolved.backend.environment(resolved.target.settings)), limits)

    def single_flight(self, store: Store, lease_seconds: float) -> SingleFlight:
        """Return what lets one of all runs compile an action in a store."""
        with self._lock:
            identity = (store.url, lease_seconds)
            if identity not in self._leases:
                self._leases[identity] = Leases(store, seconds=lease_seconds)
            return SingleFlight(store, self._leases[identity], self.stopping, lambda: self._slots)

    def pin(self, store: Store, variant: VariantName) -> RunPin:
        """Return what keeps a variant's objects from being collected until the run ends."""
        pin = RunPin(store, variant)
        with self._lock:
            self._pins.append(pin)
        return pin

    def close(self) -> None:
        """End all children and threads, whatever they are at."""
        self.stopping.set()
        with self._lock:
            pools = list(self._pools.values())
            leases, pins = list(self._leases.values()), list(self._pins)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
            pool.close()
        self._threads.shutdown(wait=True)
        for held in leases:
            held.close()
        for pin in pins:
            pin.close()

    def _pool(self, environment: dict[str, str], limits: Limits) -> ChildPool:
        identity = (tuple(sorted(environment.items())), limits)
        with self._lock:
            if identity not in self._pools:
                self._pools[identity] = ChildPool(environment=environment, jobs=self.jobs, limits=limits)
            pool = self._pools[identity]
        if self.stopping.is_set():
            pool.close()  # it may have come too late for `close` to see it
        return pool
