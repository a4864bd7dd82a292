"""One network on its way from its frontend to its manifest: what both ways to run the stages share."""

import functools
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec

from graphkiln.storage.canonical import Json
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import CompileFailedError
from graphkiln.storage.plans import distinct_graphs
from graphkiln.storage.ranks import RankSet
from graphkiln.storage.records import ActionResult, Manifest, Plan, PlannedGraph, RefRecord
from graphkiln.storage.results import manifest_of, missing_from, usable_result, usable_results
from graphkiln.storage.signing_keys import TrustedKeys
from graphkiln.storage.store import Store, open_for_writing
from graphkiln.tasks.commit import commit_manifest
from graphkiln.tasks.compile import compile_graph
from graphkiln.tasks.contracts import KernelGraph
from graphkiln.tasks.outcome import GraphOutcome, outcome_for, outcome_of_failure, outcome_of_record, outcome_of_result
from graphkiln.tasks.parse import store_plan, wanted_graphs
from graphkiln.tasks.recording import record_run
from graphkiln.tasks.resolve import ResolvedNetwork, resolve
from graphkiln.tasks.sandbox.pool import ChildFailedError
from graphkiln.tasks.spec import NetworkSpec
from graphkiln.tasks.workers import Workers

_log = logging.getLogger("graphkiln")


class Progress(Protocol):
    """Is told what happens. Its methods are called from several threads."""

    def planned(self, graphs: list[PlannedGraph]) -> None:
        """The frontend has given its kernel graphs; these are wanted."""

    def compiling(self, graph: PlannedGraph) -> None:
        """A compile has started."""

    def waiting(self, graph: PlannedGraph, owner: str) -> None:
        """Another run compiles the kernel graph, and this one waits for it."""

    def finished(self, outcome: GraphOutcome) -> None:
        """A kernel graph is cached, compiled or failed."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one run made of one network for one target.

    Attributes:
        network: the network's name.
        target: the target's name.
        variant: the variant.
        store: the store's URL.
        manifest: digest of the manifest that is committed now; None if this run did not commit.
        graphs: what became of each kernel graph that was wanted, in the plan's order.
        missing: kernel graphs of other ranks that are yet to be compiled, for which the commit waits.
        seconds: wall time of the run so far.
    """

    network: str
    target: str
    variant: Digest
    store: str
    manifest: Digest | None
    graphs: tuple[GraphOutcome, ...]
    missing: tuple[str, ...]
    seconds: float

    @property
    def failed(self) -> list[GraphOutcome]:
        """The kernel graphs that have no artifact now: failed or blocked."""
        return [outcome for outcome in self.graphs if not outcome.succeeded]

    def summary(self) -> str:
        """Return one line: how many kernel graphs are in which state, and what was committed."""
        states = [outcome.state for outcome in self.graphs]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        if self.manifest is not None:
            return f"{counts}; committed manifest {self.manifest[:12]}"
        waits = f"; waits for {', '.join(self.missing)}" if self.missing and not self.failed else ""
        return f"{counts}; not committed{waits}"

    def error(self, backend: str) -> CompileFailedError | None:
        """Return the error that names every kernel graph without an artifact, or None if each has one."""
        if not self.failed:
            return None
        lines = [f"  {item.name}: {backend}: {item.reason}: {item.message}" for item in self.failed]
        return CompileFailedError(
            f"{self.network} for {self.target}: {len(lines)} of {len(self.graphs)} kernel graphs did not compile, "
            "nothing was committed\n" + "\n".join(lines),
            reason="compile-failed",
            retryable=all(item.retryable for item in self.failed),
        )


class CompileSession:
    """One run of one network for one target. Its methods may be called from any thread, and again."""

    def __init__(
        self,
        resolved: ResolvedNetwork,
        store: Store,
        workers: Workers,
        *,
        ranks: RankSet | None = None,
        progress: Progress | None = None,
        record_hits: bool = True,
    ) -> None:
        self.resolved = resolved
        self.store = store
        self._workers = workers
        self.ranks = ranks
        self._progress = progress
        self._record_hits = record_hits
        self._waited = False
        self._started = time.monotonic()
        if not store.trust.can_sign and self.committed_before is None:
            store.trust.require_signer(f"{resolved.title} has no trusted commit")
        self._parsed: Future[list[KernelGraph]] = workers.submit(functools.partial(workers.parse, resolved))
        self.pin = workers.pin(store, (resolved.network.name, resolved.target.name, resolved.variant))
        self._known: dict[Digest, GraphOutcome] = {}
        # What was found in the store and read whole in this run.
        self._verified: dict[Digest, ActionResult] = {}
        self._report: Report | None = None
        self._planning = threading.Lock()
        self.committed: RefRecord | None = None

    @property
    def reported(self) -> bool:
        """Whether the run has come to its commit."""
        return self._report is not None

    @property
    def report(self) -> Report:
        """What `commit` reported; there is none before."""
        if self._report is None:
            raise RuntimeError(f"{self.resolved.title} has not come to its commit")
        return self._report

    @functools.cached_property
    def committed_before(self) -> Manifest | None:
        """The manifest that this variant had before the run, if it is whole."""
        return committed_manifest(self.resolved, self.store)

    @property
    def plan(self) -> Plan:
        """The plan, stored; waits for the frontend.

        Raises:
            BadInputError: the frontend refuses the network.
            CompileFailedError: the frontend's process ended, or was ended, without an answer.
        """
        with self._planning:
            return self._stored_plan

    @functools.cached_property
    def _stored_plan(self) -> Plan:
        try:
            parsed = self._parsed.result()
        except ChildFailedError as error:
            if error.reason == "interrupted":
                raise
            raise frontend_failure(self.resolved, error) from error
        self._warn_of_losses()
        plan = store_plan(self.resolved, parsed, self.store, self.pin)
        if self._progress:
            self._progress.planned(wanted_graphs(plan, self.ranks))
        return plan

    @property
    def wanted(self) -> dict[Digest, list[PlannedGraph]]:
        """The kernel graphs that the run is about, by action key, in the order in which they are to start.

        Raises:
            BadInputError: no kernel graph runs on the ranks that were asked for.
        """
        found = distinct_graphs(wanted_graphs(self.plan, self.ranks))
        # The largest first: a long compile that starts last leaves the other compilers without work at the end.
        return dict(sorted(found.items(), key=lambda item: item[1][0].payload.stored_size, reverse=True))

    def all_cached(self) -> bool:
        """Look every wanted kernel graph up, side by side, and tell whether all of them are in the store, verified."""
        unknown = {key: graphs for key, graphs in self.wanted.items() if key not in self._known}
        for key, result in usable_results(self.store, unknown).items():
            if result is not None:
                self._known[key] = self._cached(unknown[key][0], result)
                self._tell_finished(unknown[key], self._known[key])
        return self._known.keys() >= self.wanted.keys()

    def start(self, key: Digest) -> Future[GraphOutcome]:
        """Start to look a kernel graph up and else compile it, or join what has been started for it."""
        known = self._known.get(key)
        if known is None:
            return self._workers.submit_once(key, functools.partial(self._obtain, key))
        done: Future[GraphOutcome] = Future()
        done.set_result(known)
        return done

    def known_outcome(self, key: Digest) -> GraphOutcome | None:
        """Return what became of a kernel graph, or None if it was not started or has not ended."""
        return self._known.get(key)

    def failure_log(self, key: Digest) -> str:
        """Return what the compiler printed when an action last failed; empty if nothing is kept."""
        failure = self.store.mend(lambda: self.store.read_failure(key))
        if failure is None or failure.log is None:
            return ""
        ref = failure.log
        log = self.store.mend(lambda: self.store.get_blob(ref, f"the compiler log of {failure.graph}"))
        return (log or b"").decode(errors="replace")

    def commit(self, outcomes: dict[Digest, GraphOutcome]) -> Report:
        """Commit if the whole plan has compiled, and report.

        Args:
            outcomes: what became of the wanted kernel graphs, by action key.

        Raises:
            DamagedStoreError: what is about to be named is not what was written.
        """
        named = {
            graph.name: outcome_for(graph, outcomes[key]) for key, graphs in self.wanted.items() for graph in graphs
        }
        missing = self._missing(named)
        succeeded = all(outcome.succeeded for outcome in named.values())
        if succeeded and not missing:
            self.committed = commit_manifest(self.plan, named, self.store, self.pin, self._verified)
        self._report = Report(
            network=self.plan.network.name,
            target=self.plan.target.name,
            variant=self.plan.variant,
            store=self.store.url,
            manifest=self.committed.manifest if self.committed else None,
            graphs=tuple(named[graph.name] for graph in self.plan.graphs if graph.name in named),
            missing=missing,
            seconds=time.monotonic() - self._started,
        )
        if self._record_hits or self._made_something():
            record_run(self.plan, named, self.store)
        return self._report

    def _made_something(self) -> bool:
        """Tell whether the run did, or waited for, anything that the store did not have, or commits it anew."""
        before = self.committed_before
        return (
            self._waited
            or any(outcome.state != "cached" for outcome in self.report.graphs)
            or before is None
            or before.plan != self.plan
        )

    def _obtain(self, key: Digest) -> GraphOutcome:
        graphs = self.wanted[key]
        flight = self._workers.single_flight(self.store, self.resolved.limits.lease_seconds)
        outcome = flight.obtain(
            key,
            look_up=lambda: self._look_up(graphs[0]),
            compile_under=lambda lease: self._compile(graphs, lease),
            failed_elsewhere=lambda failure: outcome_of_record(graphs[0], failure),
            tell_waiting=lambda owner: self._tell_waiting(graphs, owner),
        ) or outcome_of_failure(graphs[0], CompileFailedError("the run was interrupted", reason="interrupted"))
        self._known[key] = outcome
        self._tell_finished(graphs, outcome)
        return outcome

    def _compile(self, graphs: list[PlannedGraph], lease: str) -> GraphOutcome:
        if self._progress:
            for graph in graphs:
                self._progress.compiling(graph)
        compilers = self._workers.compilers(self.resolved)
        return compile_graph(self.plan, graphs[0], self.store, compilers, lease=lease, pin=self.pin)

    def _tell_waiting(self, graphs: list[PlannedGraph], owner: str) -> None:
        self._waited = True
        if self._progress:
            for graph in graphs:
                self._progress.waiting(graph, owner)

    def _tell_finished(self, graphs: list[PlannedGraph], outcome: GraphOutcome) -> None:
        if self._progress:
            for graph in graphs:
                self._progress.finished(outcome_for(graph, outcome))

    def _missing(self, named: dict[str, GraphOutcome]) -> tuple[str, ...]:
        others = [graph for graph in self.plan.graphs if graph.name not in named]
        return tuple(graph.name for graph in others if usable_result(self.store, graph.key) is None)

    def _look_up(self, graph: PlannedGraph) -> GraphOutcome | None:
        result = usable_result(self.store, graph.key)
        if result is None:
            self.store.trust.require_signer(f"{graph.name} of {self.resolved.title} has no trusted result")
            return None
        return self._cached(graph, result)

    def _cached(self, graph: PlannedGraph, result: ActionResult) -> GraphOutcome:
        self._verified[graph.key] = result
        return outcome_of_result(graph, result, "cached")

    def _warn_of_losses(self) -> None:
        """Say which documents of a committed variant are gone, as nobody would know why it compiles again."""
        if self.committed_before is not None:
            for lost in missing_from(self.store, self.committed_before):
                _log.warning("%s: it will be made again", lost)


def open_session(
    spec: NetworkSpec | str | Path,
    workers: Workers,
    *,
    target: str | None = None,
    parameters: Mapping[str, Json] | None = None,
    store: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trusted_keys: TrustedKeys | None = None,
    ranks: RankSet | None = None,
    progress: Progress | None = None,
    spills: bool = False,
    record_hits: bool = True,
) -> CompileSession:
    """Resolve a network, make sure that the store can be written, and start the frontend.

    Args:
        spec: a `NetworkSpec`, or the path of one in TOML.
        workers: the threads and children to use.
        target: one of the spec's targets; the first if None.
        parameters: what to set over the spec's parameters.
        store: URL of the store; `graphkiln.storage.locations.default_url()` if None.
        storage_options: what fsspec passes to the store's file system.
        trusted_keys: whose signatures count; see `graphkiln.storage.store.open_store`.
        ranks: compile only what these ranks need.
        progress: is told what happens.
        spills: whether to go on in memory if the store becomes full; see `open_for_writing`.
        record_hits: whether the catalogue gets a row for each kernel graph even if all was there and committed. A
            trainer's warm start does without, as it would import pyarrow, which takes a quarter of a second.

    Raises:
        BadInputError: the spec, the target, the parameters, a key or the store cannot be used.
    """
    resolved = resolve(spec, target, parameters)
    opened = open_for_writing(store, storage_options, trusted_keys=trusted_keys, spills=spills)
    return CompileSession(resolved, opened, workers, ranks=ranks, progress=progress, record_hits=record_hits)


def committed_manifest(resolved: ResolvedNetwork, store: Store) -> Manifest | None:
    """Return the manifest of a variant if it is committed; damage is set aside with a warning."""
    variant = (resolved.network.name, resolved.target.name, resolved.variant)
    ref = store.mend(lambda: store.read_ref(*variant))
    return None if ref is None else store.mend(lambda: manifest_of(store, ref))


def frontend_failure(resolved: ResolvedNetwork, error: ChildFailedError) -> CompileFailedError:
    """Return the error of a frontend that gave no answer, with the last lines of what it printed."""
    tail = "\n".join(f"  | {line}" for line in error.log.decode(errors="replace").splitlines()[-20:])
    return CompileFailedError(
        f"frontend {resolved.network.frontend} failed on {resolved.network.name}: {error.reason}: {error}"
        + (f"\n{tail}" if tail else ""),
        reason="frontend-failed",
        retryable=error.retryable,
    )
