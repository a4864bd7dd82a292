"""The flow `compile_network`: one network for one target, one manifest."""

from contextvars import ContextVar
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from graphkiln.flows.engine import run_sessions, thread_runner
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.ranks import RankSet
from graphkiln.tasks.session import CompileSession, open_session
from graphkiln.tasks.spec import NetworkSpec
from graphkiln.tasks.workers import Workers, default_jobs

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
        wanted = None if ranks is None else RankSet.parse(ranks)
        return _run(open_session(spec, workers, target=target, parameters=parameters, store=store, ranks=wanted))


def run_as_flow(session: CompileSession, jobs: int) -> None:
    """Run a session that has been opened already, and whose frontend is at work, as a run of this flow.

    Raises:
        BadInputError: the Prefect server does not answer.
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
            store=session.store.url,
            jobs=jobs,
        )
    except RuntimeError as error:
        if str(error).startswith("Failed to reach API"):  # Prefect has no class of its own for it
            message = f"Prefect: {error}; start the server, change PREFECT_API_URL, or run without Prefect"
            raise BadInputError(message, reason="prefect-server", retryable=True) from error
        raise
    finally:
        _prepared.reset(token)


def _run(session: CompileSession) -> State:
    error = run_sessions([session])[0]
    if error is not None:
        return Failed(message=str(error), data=error)
    return Completed(message=session.report.summary(), data=session.report)
