"""Running sessions as tasks of the flow run at hand: one flow with many tasks, never a flow for each network."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple, cast

from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, as_completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import CompileFailedError
from graphkiln.tasks.outcome import GraphOutcome
from graphkiln.tasks.prefect_tasks import commit_manifest, compile_kernel_graph, parse_frontend
from graphkiln.tasks.session import CompileSession, Report

TaskFuture = PrefectFuture[Any]


def thread_runner(jobs: int) -> TaskRunner[PrefectFuture[Any]]:
    """Return a task runner whose threads wait for at most `jobs` children at once."""
    return cast("TaskRunner[PrefectFuture[Any]]", ThreadPoolTaskRunner[Any](max_workers=jobs))


def run_sessions(sessions: Sequence[CompileSession]) -> list[Exception | None]:
    """Parse all networks, compile their distinct kernel graphs once, and commit each network as soon as it is complete.

    Returns:
        What went wrong with each session, or None. One that failed stops none of the others. An exception that is no
        `GraphKilnError` is a bug.
    """
    errors: dict[CompileSession, Exception | None] = {}
    compiling = _start_compiles(sessions, errors)
    waiting = {session: set(session.wanted) for session in sessions if session not in errors}
    for future in as_completed(list(compiling)):
        future.wait()  # only then does the future know its final state
        for session, keys in list(waiting.items()):
            keys.discard(compiling[future].key)
            if not keys:
                del waiting[session]
                errors[session] = _finish(session, compiling)
    return [errors[session] for session in sessions]


class _Compile(NamedTuple):
    key: Digest
    session: CompileSession  # the one that does it for all that want it


def _start_compiles(
    sessions: Sequence[CompileSession], errors: dict[CompileSession, Exception | None]
) -> dict[TaskFuture, _Compile]:
    parsing = {parse_frontend.submit(session, session.resolved.title): session for session in sessions}
    compiling: dict[TaskFuture, _Compile] = {}
    started: set[Digest] = set()
    for parsed in as_completed(list(parsing)):
        parsed.wait()
        session = parsing[parsed]
        if not parsed.state.is_completed():
            errors[session] = _error_of(parsed.state)
            continue
        for key, graphs in session.wanted.items():
            if key not in started:
                started.add(key)
                future = compile_kernel_graph.submit(
                    session, key, graphs[0].name, return_state=False, wait_for=[parsed]
                )
                compiling[future] = _Compile(key, session)
    return compiling


def _finish(session: CompileSession, compiling: Mapping[TaskFuture, _Compile]) -> Exception | None:
    """Commit a session whose compiles have all ended, or only report it if one of them failed."""
    wanted = session.wanted
    futures = {item.key: future for future, item in compiling.items() if item.key in wanted}
    outcomes: dict[Digest, GraphOutcome] = {}
    for key, future in futures.items():
        known = compiling[future].session.known_outcome(key)
        if known is None:
            return _error_of(future.state)  # the compiler was not asked: the store or the run is at fault
        outcomes[key] = known
    if all(outcome.succeeded for outcome in outcomes.values()):
        # Called, not submitted: submitted, it would wait behind the compiles of all other networks.
        state = commit_manifest(
            session, outcomes, session.resolved.title, return_state=True, wait_for=list(futures.values())
        )
        if not state.is_completed():
            return _error_of(state)
    else:
        session.commit(outcomes)  # only reports, as something has failed
    _show_table(session.report)
    return session.report.error(session.resolved.target.backend)


def _error_of(state: State[Any]) -> Exception:
    error = state.result(raise_on_failure=False)
    if isinstance(error, Exception) and not isinstance(error, CancelledError):
        return error
    return CompileFailedError(f"a task ended as {state.name}: {state.message}", reason="interrupted", retryable=True)


def _show_table(report: Report) -> None:
    create_table_artifact(
        key=re.sub(r"[^a-z0-9]+", "-", f"{report.network}-{report.target}".lower()).strip("-"),
        table=[
            {
                "kernel graph": outcome.name,
                "ranks": outcome.ranks,
                "state": outcome.state,
                "seconds": None if outcome.seconds is None else round(outcome.seconds, 2),
                "bytes": outcome.bytes,
                "reason": outcome.reason or "",
            }
            for outcome in report.graphs
        ],
        description=report.summary(),
    )
