"""The flow `precompile`: many networks for many targets, shared kernel graphs compiled once."""

from dataclasses import dataclass
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
    with Workers(jobs) as workers:
        entries = [entry for request in networks for entry in _open(request, workers, store)]
        opened = [(entry, entry.session) for entry in entries if entry.session is not None]
        found = run_sessions([session for _, session in opened])
        for (entry, _), problem in zip(opened, found, strict=True):
            entry.problem = problem
        create_markdown_artifact(_summary(entries), key="precompile", description="What became of each network")
    failed = [entry for entry in entries if entry.problem is not None]
    if not failed:
        return Completed(message=f"{len(entries)} networks committed")
    lines = [
        f"{len(failed)} of {len(entries)} networks failed",
        *(f"  {entry.title}: {entry.told}" for entry in failed),
    ]
    message = "\n".join(lines)
    return Failed(message=message, data=CompileFailedError(message, reason="compile-failed"))


@dataclass
class _Entry:
    """One network for one target, and what became of it."""

    title: str
    session: CompileSession | None = None
    problem: Exception | None = None

    @property
    def told(self) -> str:
        """What became of it, in one line."""
        if self.problem is None:
            return self.session.report.summary() if self.session else ""
        if not isinstance(self.problem, GraphKilnError):
            return f"a bug in graphkiln: {self.problem!r}"
        return " ".join(str(self.problem).split())


def _open(request: PrecompileRequest, workers: Workers, store: str | None) -> list[_Entry]:
    try:
        spec = request.spec if isinstance(request.spec, NetworkSpec) else load_spec(request.spec)
    except GraphKilnError as error:
        return [_Entry(str(request.spec), problem=error)]
    entries = []
    for target in request.targets or list(spec.targets):
        try:
            session = open_session(spec, workers, target=target, parameters=request.parameters, store=store)
            entries.append(_Entry(session.resolved.title, session))
        except GraphKilnError as error:
            entries.append(_Entry(f"{spec.name} for {target}", problem=error))
    return entries


def _summary(entries: list[_Entry]) -> str:
    rows = [f"| {entry.title} | {entry.told.replace('|', chr(92) + '|')} |" for entry in entries]
    return "\n".join(["| network | result |", "|---|---|", *rows])
