"""The stages as Prefect tasks: thin, so that a run with and a run without Prefect do the same.

Prefect's own result cache takes no part: the store is asked inside the task, and what it has shows as `Cached`.
A failed compile is returned as a failed state rather than raised, so that the others go on.
"""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import CompileFailedError, GraphKilnError
from graphkiln.tasks.outcome import GraphOutcome
from graphkiln.tasks.session import CompileSession

_LOG_LINES = 40


@task(name="parse_frontend", task_run_name="parse {title}", cache_policy=NO_CACHE, persist_result=False)
def parse_frontend(session: CompileSession, title: str) -> State[Any]:
    """Wait for the frontend's child and store the plan."""
    try:
        plan = session.plan
        wanted = session.wanted
    except GraphKilnError as error:
        get_run_logger().error("%s", error)
        return Failed(message=str(error), data=error)
    return Completed(message=f"{title}: {len(plan.graphs)} kernel graphs, {len(wanted)} distinct ones wanted")


@task(name="compile_kernel_graph", task_run_name="compile {graph}", cache_policy=NO_CACHE, persist_result=False)
def compile_kernel_graph(session: CompileSession, key: Digest, graph: str) -> State[GraphOutcome]:
    """Look one distinct kernel graph up, and compile it in a child if it is not there."""
    outcome = session.start(key).result()
    if outcome.state == "cached":
        return Completed(name="Cached", message=f"{graph} is in the store, verified", data=outcome)
    if outcome.succeeded:
        return Completed(message=f"{graph} compiled in {outcome.seconds:.1f} s", data=outcome)
    logger = get_run_logger()
    logger.error("%s: %s: %s", graph, outcome.reason, outcome.message)
    log = session.failure_log(key)
    if log:
        logger.error("the end of the compiler's log of %s:\n%s", graph, "\n".join(log.splitlines()[-_LOG_LINES:]))
    message = f"{graph}: {outcome.reason}: {outcome.message}"
    return Failed(message=message, data=CompileFailedError(message, reason=outcome.reason or "compile-failed"))


@task(name="commit_manifest", task_run_name="commit {title}", cache_policy=NO_CACHE, persist_result=False)
def commit_manifest(session: CompileSession, outcomes: dict[Digest, GraphOutcome], title: str) -> State[Any]:
    """Read everything back, write the manifest and move the ref."""
    try:
        report = session.commit(outcomes)
    except GraphKilnError as error:
        get_run_logger().error("%s", error)
        return Failed(message=str(error), data=error)
    if report.manifest is None:
        return Completed(name="NotCommitted", message=f"{title}: waits for {', '.join(report.missing)} of other ranks")
    return Completed(message=f"{title}: manifest {report.manifest}")
