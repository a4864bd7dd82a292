"""Runs of the product's own stages whose frontend and compilers are stand-ins, so that one takes milliseconds.

The children are not what is tested: everything that touches the store is the product's own.
"""

import functools
import threading
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from typing import cast

from graphkiln.flows.direct import run_direct
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.leases import Leases
from graphkiln.storage.pins import RunPin
from graphkiln.storage.ranks import RankSet
from graphkiln.storage.records import VariantName
from graphkiln.storage.store import Store
from graphkiln.tasks.contracts import KernelGraph
from graphkiln.tasks.frontends.file import PAYLOAD_FORMAT
from graphkiln.tasks.outcome import GraphOutcome
from graphkiln.tasks.resolve import ResolvedNetwork, resolve
from graphkiln.tasks.sandbox.outcome import ChildFailedError, ChildResult, CompileJob, Usage
from graphkiln.tasks.sandbox.pool import ChildPool
from graphkiln.tasks.session import CompileSession, Report
from graphkiln.tasks.single_flight import SingleFlight
from graphkiln.tasks.spec import NetworkSpec, TargetSpec
from graphkiln.tasks.workers import Made, Workers

LEASE_SECONDS = 30.0

Kernels = Mapping[str, bytes]
Outputs = dict[str, dict[str, bytes]]


@functools.cache
def resolved_network() -> ResolvedNetwork:
    """The network that all runs are about, resolved for the real `cc`, which is never started."""
    target = TargetSpec.model_validate(
        {"backend": "command", "argv": ["cc", "-shared", "{input}", "-o", "{output}"], "output_name": "kernel.so"}
    )
    return resolve(
        NetworkSpec(
            name="kernels",
            frontend="file",
            entrypoint="kernels/*.c",
            targets={"native": target},
            limits={"lease_seconds": LEASE_SECONDS},  # type: ignore[arg-type]  # pydantic makes the table a model
        )
    )


def outputs_of(kernels: Kernels) -> Outputs:
    """Return what the stand-in for the compiler makes of kernels."""
    return {kernel: _compiled(source) for kernel, source in kernels.items()}


def run(store: Callable[[], Store], kernels: Kernels, failing: Container[str] = ()) -> tuple[Report, "StandInWorkers"]:
    """Run all stages of the network once.

    Args:
        store: opens the store for writing.
        kernels: what the frontend gives.
        failing: those that do not compile.
    """
    workers = StandInWorkers(kernels, failing)
    with workers:
        return run_direct(CompileSession(resolved_network(), store(), workers)), workers


class StandInWorkers(Workers):
    """Stands in for threads and children: all is done in the calling thread, so that operations come in one order.

    Time passes only where a run waits for another.

    Attributes:
        compiled: the kernel graphs that were compiled, in order.
        waited: how long the run has waited for others, in seconds.
    """

    def __init__(self, kernels: Kernels, failing: Container[str]) -> None:
        super().__init__(jobs=1)
        self._kernels, self._failing = kernels, failing
        self._done: dict[Digest, Future[GraphOutcome]] = {}
        self._own_leases: Leases | None = None
        self.compiled: list[str] = []
        self.waited = 0.0

    def submit(self, function: Callable[[], Made]) -> Future[Made]:
        done: Future[Made] = Future()
        try:
            done.set_result(function())
        except Exception as error:  # noqa: BLE001  # as a thread's future does; a kill ends the whole run
            done.set_exception(error)
        return done

    def submit_once(self, key: Digest, function: Callable[[], GraphOutcome]) -> Future[GraphOutcome]:
        if key not in self._done:
            self._done[key] = self.submit(function)
        return self._done[key]

    def parse(self, resolved: ResolvedNetwork) -> list[KernelGraph]:
        return [
            KernelGraph(kernel, source, PAYLOAD_FORMAT, RankSet.of(range(4 * number, 4 * number + 4)))
            for number, (kernel, source) in enumerate(self._kernels.items())
        ]

    def compilers(self, resolved: ResolvedNetwork) -> ChildPool:
        return cast(ChildPool, self)  # of which a session only calls `compile`

    def compile(self, backend: str, job: CompileJob) -> ChildResult[dict[str, bytes]]:
        self.compiled.append(job.graph)
        if job.graph in self._failing:
            raise ChildFailedError("no registers", reason="compiler-error", usage=Usage(b"no registers left\n", 0.5, 1))
        return ChildResult(b"a warning\n" if job.graph == "scale" else b"", 0.5, 1, _compiled(job.payload))

    def single_flight(self, store: Store, lease_seconds: float) -> SingleFlight:
        if self._own_leases is None:
            self._own_leases = Leases(store, seconds=lease_seconds, monotonic=lambda: self.waited)
        return SingleFlight(store, self._own_leases, _Waiting(self), lambda: self._slots)

    def pin(self, store: Store, variant: VariantName) -> RunPin:
        pin = super().pin(store, variant)
        pin._sleep, pin._monotonic = self.wait, lambda: self.waited
        return pin

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.waited += seconds

    def close(self) -> None:
        super().close()
        if self._own_leases is not None:
            self._own_leases.close()


class _Waiting(threading.Event):
    """Never set, and takes no time to wait for."""

    def __init__(self, workers: StandInWorkers) -> None:
        super().__init__()
        self._workers = workers

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._workers.wait(timeout)
        return False


def _compiled(source: bytes) -> dict[str, bytes]:
    digest = digest_bytes(source).encode()
    return {"kernel.so": b"\x7fELF" + digest * 100, "symbols": digest}
