"""The command `compile`, with Prefect's server or without."""

import atexit
import contextlib
import logging
import os
import threading
from pathlib import Path

import click

from graphkiln.flows.commands.common import (
    StoreLocation,
    errors_as_json,
    json_option,
    jsonable,
    out,
    print_json,
    store_options,
    target_option,
)
from graphkiln.flows.console import ConsoleProgress, print_report
from graphkiln.flows.direct import run_direct
from graphkiln.flows.embedded_server import EmbeddedServer
from graphkiln.flows.interrupts import interruptible
from graphkiln.flows.prefect_server import import_flow, server_configured
from graphkiln.storage.errors import BadInputError, CompileFailedError, NotCommittedError
from graphkiln.tasks.checks import parse_ranks
from graphkiln.tasks.session import CompileSession, open_session
from graphkiln.tasks.spec import parse_assignment
from graphkiln.tasks.workers import Workers

server_lost = threading.Event()


@click.command("compile")
@click.argument("spec", type=click.Path(path_type=Path))
@target_option
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Set a parameter of the network.")
@click.option("--ranks", metavar="RANKS", help="Compile only what these ranks need, such as 13 or 0-15,32.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at once on this host. [default: cores]")
@click.option("--no-prefect", is_flag=True, help="Run the stages without Prefect.")
@store_options
@json_option
def compile_command(
    spec: Path,
    target: str | None,
    assignments: tuple[str, ...],
    ranks: str | None,
    jobs: int | None,
    no_prefect: bool,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """Compile the network in SPEC, a TOML file, for one target, and commit it."""
    with (
        errors_as_json(as_json),
        Workers(jobs) as workers,
        interruptible(workers.close),
        _progress(as_json) as progress,
    ):
        session = open_session(
            spec,
            workers,
            target=target,
            parameters=dict(parse_assignment(item) for item in assignments),
            store=store.url,
            storage_options=store.parsed_options(),
            trusted_keys=store.trusted_keys or None,
            ranks=parse_ranks(ranks),
            progress=progress,
        )
        if progress is not None:
            progress.say(f"{session.resolved.title}, store {session.store.url}")
        if no_prefect:
            run_direct(session)
        elif server_configured():
            _run_as_flow(session, workers.jobs)
        else:
            _run_on_embedded_server(session, workers.jobs, progress)
        report = session.report
    if as_json:
        backend = session.resolved.target.backend
        print_json({"committed": report.manifest is not None, "backend": backend, **jsonable(report)})
    else:
        print_report(out, report, session.resolved.target.backend)
    if report.failed:
        return CompileFailedError.exit_code
    return 0 if report.manifest is not None else NotCommittedError.exit_code


def _run_on_embedded_server(session: CompileSession, jobs: int, progress: ConsoleProgress | None) -> None:
    """Run the flow on a server of our own, or without Prefect if everything turns out to be cached."""
    if session.all_cached():
        run_direct(session)
        return
    # The compilers work while the server starts; the tasks collect what they make.
    for key in session.wanted:
        session.start(key)
    if progress is not None:
        progress.say("starting Prefect's embedded server, which takes 10 to 20 s; the compilers are at work")
    server = EmbeddedServer()
    # Registered before Prefect's own exit handlers, so that it runs after them.
    atexit.register(server.stop)
    _run_as_flow(session, jobs, server)


def _run_as_flow(session: CompileSession, jobs: int, server: EmbeddedServer | None = None) -> None:
    """Run the flow; that kernel graphs failed is in the report, and shown from there."""
    # Prefect reads these when it is imported. Its console lines would repeat ours.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_INTERNAL_LOGGING_LEVEL", "CRITICAL")
    # Half a minute for a server that restarts; the default is minutes of silence after all is compiled.
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "3")
    logging.raiseExceptions = False  # else Prefect prints each log line that its server does not take
    if server is not None:
        os.environ["PREFECT_API_URL"] = server.url
        # A proxy does not lead to this host.
        exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        os.environ["no_proxy"] = f"{exempt},127.0.0.1" if exempt else "127.0.0.1"
    run_as_flow = import_flow()
    if server is not None:
        server.wait_until_ready()
    try:
        if not run_as_flow(session, jobs):
            server_lost.set()
    except CompileFailedError:
        if not session.reported:
            raise
    except BadInputError as error:
        if error.reason == "prefect-server":
            server_lost.set()
        raise


def _progress(as_json: bool) -> contextlib.AbstractContextManager[ConsoleProgress | None]:
    return contextlib.nullcontext() if as_json else ConsoleProgress(out)
