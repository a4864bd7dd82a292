"""The flow `precompile`: many networks for many targets, shared kernel graphs compiled once."""

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import BaseModel, Field

from graphkiln.flows.engine import run_sessions, thread_runner
from graphkiln.storage.errors import CompileFailedError, GraphKilnError
from graphkiln.tasks.session import CompileSession, open_session
from graphkiln.tasks.spec import NetworkSpec, load_spec
from graphkiln.tasks.workers import Workers, default_jobs


class PrecompileRequest(BaseModel):
    """One network, for some or all of its targets."""

    spec: NetworkSpec | str = Field(description="The network, or the path of its TOML spec.")
    targets: list[str] | None = Field(default=None, description="Which of its targets; all of them if unset.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="What to set over the spec's parameters.")


@flow(name="precompile", persist_result=False, task_runner=thread_runner(default_jobs()))
def precompile(networks: list[PrecompileRequest], store: str | None = None, jobs: int | None = None) -> State:
    """Compile and commit many networks. One that fails stops none of the others.

    Args:
        networks: what to compile.
        store: URL of the store; ``$GRAPHKILN_STORE`` or the user's cache folder if unset.
        jobs: how many compilers may work at once; the number of cores if unset.
    """
    problems: dict[str, GraphKilnError | None] = {}
    with Workers(jobs) as workers:
        sessions: list[CompileSession] = []
        for title, spec, target, parameters in _requested(networks, problems):
            try:
                sessions.append(open_session(spec, workers, target=target, parameters=parameters, store=store))
            except GraphKilnError as error:
                problems[title] = error
        for session, problem in zip(sessions, run_sessions(sessions), strict=True):
            problems[session.resolved.title] = problem
        create_markdown_artifact(_summary(sessions, problems), key="precompile", description="What became of each")
    failed = [title for title, problem in problems.items() if problem is not None]
    if not failed:
        return Completed(message=f"{len(problems)} networks committed")
    message = f"{len(failed)} of {len(problems)} networks failed: {'; '.join(failed)}"
    return Failed(message=message, data=CompileFailedError(message, reason="compile-failed"))


def _requested(
    networks: list[PrecompileRequest], problems: dict[str, GraphKilnError | None]
) -> list[tuple[str, NetworkSpec, str, dict[str, Any]]]:
    found: list[tuple[str, NetworkSpec, str, dict[str, Any]]] = []
    for request in networks:
        try:
            spec = request.spec if isinstance(request.spec, NetworkSpec) else load_spec(request.spec)
        except GraphKilnError as error:
            problems[str(request.spec)] = error
            continue
        targets = request.targets or list(spec.targets)
        found += [(f"{spec.name} for {target}", spec, target, request.parameters) for target in targets]
    return found


def _summary(sessions: list[CompileSession], problems: dict[str, GraphKilnError | None]) -> str:
    lines = ["| network | result |", "|---|---|"]
    by_title = {session.resolved.title: session for session in sessions}
    for title, problem in problems.items():
        text = by_title[title].report.summary() if problem is None else str(problem).splitlines()[0]
        lines.append(f"| {title} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)
