"""Running sessions as tasks of the flow run at hand: one flow with many tasks, never a flow for each network."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from prefect.artifacts import create_table_artifact
from prefect.futures import PrefectFuture, as_completed, wait
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import CompileFailedError, GraphKilnError
from graphkiln.tasks.outcome import GraphOutcome, outcome_of_failure
from graphkiln.tasks.prefect_tasks import commit_manifest, compile_kernel_graph, parse_frontend
from graphkiln.tasks.session import CompileSession, Report

TaskFuture = PrefectFuture[Any]


def thread_runner(jobs: int) -> TaskRunner[PrefectFuture[Any]]:
    """Return a task runner whose threads wait for at most `jobs` children at once."""
    return cast("TaskRunner[PrefectFuture[Any]]", ThreadPoolTaskRunner[Any](max_workers=jobs))


def run_sessions(sessions: Sequence[CompileSession]) -> list[GraphKilnError | None]:
    """Parse all networks, compile their distinct kernel graphs once, and commit each network that is complete.

    Returns:
        What went wrong with each session, or None. One that failed stops none of the others.
    """
    parsing = {parse_frontend.submit(session, session.resolved.title): session for session in sessions}
    compiling: dict[Digest, TaskFuture] = {}
    errors: dict[CompileSession, GraphKilnError | None] = {}
    for parsed in as_completed(list(parsing)):
        parsed.wait()  # only then does the future know its final state
        session = parsing[parsed]
        if not parsed.state.is_completed():
            errors[session] = _error_of(parsed)
            continue
        for key, graphs in session.wanted.items():
            if key not in compiling:
                compiling[key] = compile_kernel_graph.submit(
                    session, key, graphs[0].name, return_state=False, wait_for=[parsed]
                )
    for session in sessions:
        if session not in errors:
            errors[session] = _commit(session, {key: compiling[key] for key in session.wanted})
    return [errors[session] for session in sessions]


def _commit(session: CompileSession, compiling: Mapping[Digest, TaskFuture]) -> GraphKilnError | None:
    wait(list(compiling.values()))
    outcomes = {key: _outcome_of(session, key, future) for key, future in compiling.items()}
    if all(outcome.succeeded for outcome in outcomes.values()):
        committing = commit_manifest.submit(
            session, outcomes, session.resolved.title, return_state=False, wait_for=list(compiling.values())
        )
        committing.wait()
        if not committing.state.is_completed():
            return _error_of(committing)
    else:
        session.commit(outcomes)  # only reports, as something has failed
    _show_table(session.report)
    return session.report.error(session.resolved.target.backend)


def _outcome_of(session: CompileSession, key: Digest, future: TaskFuture) -> GraphOutcome:
    """Return what the session knows; a task that never got to run it leaves the kernel graph blocked."""
    known = session.known_outcome(key)
    if known is not None:
        return known
    error = CompileFailedError(f"its task ended as {future.state.name}: {future.state.message}", reason="interrupted")
    return outcome_of_failure(session.wanted[key][0], error)


def _error_of(future: TaskFuture) -> GraphKilnError:
    error = future.state.result(raise_on_failure=False)
    if isinstance(error, GraphKilnError):
        return error
    if isinstance(error, BaseException):
        raise error  # a bug of ours, which must not look like a failed compile
    return CompileFailedError(f"a task ended as {future.state.name}: {future.state.message}", reason="interrupted")


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
