"""The flow `compile_network`: one network for one target, one manifest."""

import logging
from contextvars import ContextVar
from typing import Any

import httpx
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from graphkiln.flows.engine import run_sessions, thread_runner
from graphkiln.storage.errors import BadInputError, GraphKilnError
from graphkiln.tasks.checks import parse_ranks
from graphkiln.tasks.session import CompileSession, open_session
from graphkiln.tasks.spec import NetworkSpec
from graphkiln.tasks.workers import Workers, default_jobs

_log = logging.getLogger("graphkiln")
_prepared: ContextVar[CompileSession | None] = ContextVar("prepared session", default=None)


@flow(name="compile_network", persist_result=False, task_runner=thread_runner(default_jobs()))
def compile_network(
    spec: NetworkSpec | str,
    target: str | None = None,
    parameters: dict[str, Any] | None = None,
    ranks: str | None = None,
    store: str | None = None,
    jobs: int | None = None,
) -> State:
    """Compile one network for one target, and commit its manifest if every kernel graph compiled.

    Args:
        spec: the network, or the path of its TOML spec on the host where the flow runs.
        target: one of the spec's targets; the first if unset.
        parameters: what to set over the spec's parameters.
        ranks: compile only what these ranks need, such as ``13`` or ``0-15,32``.
        store: URL of the store; ``$GRAPHKILN_STORE`` or the user's cache folder if unset.
        jobs: how many compilers may work at once; the number of cores if unset.
    """
    session = _prepared.get()
    if session is not None:
        return _run(session)
    with Workers(jobs) as workers:
        try:
            wanted = parse_ranks(ranks)
            session = open_session(spec, workers, target=target, parameters=parameters, store=store, ranks=wanted)
        except GraphKilnError as error:
            return Failed(message=str(error), data=error)
        return _run(session)


def run_as_flow(session: CompileSession, jobs: int) -> bool:
    """Run a session that has been opened already, and whose frontend is at work, as a run of this flow.

    Returns:
        Whether Prefect's server has heard of the end. If it went away before, the session's report still holds.

    Raises:
        BadInputError: the Prefect server does not answer, or went away before the session came to its commit.
        GraphKilnError: what else went wrong.
    """
    token = _prepared.set(session)
    try:
        network = session.resolved.network
        run = compile_network.with_options(flow_run_name=session.resolved.title, task_runner=thread_runner(jobs))
        run(
            spec=network.name,
            target=session.resolved.target.name,
            parameters=network.parameters,
            ranks=None if session.ranks is None else str(session.ranks),
            store=session.store.url,
            jobs=jobs,
        )
    except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "Failed to reach API" not in str(error):
            raise  # Prefect has no class of its own for it
        told = " ".join(str(error).split()) or type(error).__name__
        if session.reported:
            _log.warning("Prefect's server went away before the end of the run, which it shows as running: %s", told)
            return False
        message = (
            f"Prefect's server cannot be used: {told}; what had compiled is kept; start the server, change "
            "PREFECT_API_URL, or run without Prefect"
        )
        raise BadInputError(message, reason="prefect-server", retryable=True) from error
    finally:
        _prepared.reset(token)
    return True


def _run(session: CompileSession) -> State:
    error = run_sessions([session])[0]
    if error is not None:
        if not isinstance(error, GraphKilnError):
            raise error  # a bug, which keeps its traceback
        return Failed(message=str(error), data=error)
    return Completed(message=session.report.summary(), data=session.report)
