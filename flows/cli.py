"""The command line. Exit codes are those of `graphkiln.storage.errors`; 130 is Ctrl-C, 1 a bug of ours."""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import orjson
from rich.console import Console

import graphkiln
from graphkiln.flows.console import (
    ConsoleProgress,
    PipeConsole,
    print_explanation,
    print_graphs,
    print_report,
    print_variants,
    print_verification,
    warnings_to,
)
from graphkiln.flows.direct import run_direct
from graphkiln.flows.embedded_server import EmbeddedServer
from graphkiln.flows.inspection import compiler_log, explain, variants_of
from graphkiln.flows.interrupts import interruptible
from graphkiln.flows.prefect_server import import_flow, server_configured
from graphkiln.storage.errors import (
    BadInputError,
    CompileFailedError,
    DamagedStoreError,
    GraphKilnError,
    NotCommittedError,
)
from graphkiln.storage.store import Store, default_url, open_store
from graphkiln.storage.verify import verify_store
from graphkiln.tasks.checks import parse_ranks
from graphkiln.tasks.session import CompileSession, open_session
from graphkiln.tasks.spec import load_spec, parse_assignment
from graphkiln.tasks.workers import Workers

EXIT_INTERRUPTED = 130

_EPILOG = """\b
Exit codes:
  0    committed, or nothing is wrong
  1    a bug in graphkiln, with a traceback
  2    bad input
  3    a kernel graph did not compile; nothing was committed
  4    the store is damaged
  5    what was asked for compiled, but nothing is committed yet (--ranks)
  6    the store's medium failed, such as a full disk
  130  interrupted; what had compiled is kept
"""

Command = TypeVar("Command", bound=Callable[..., Any])

_out = PipeConsole()
_err = Console(stderr=True)
_server_lost = threading.Event()


def main() -> None:
    """Run the command line and exit."""
    warnings_to(_err)
    try:
        code = cli.main(prog_name="graphkiln", standalone_mode=False)
    except click.ClickException as error:
        if "--json" in sys.argv:
            _print_json_error("usage", error.format_message())
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        if "--json" in sys.argv:
            _print_json_error("interrupted", "interrupted: what had compiled is kept", retryable=True)
        _err.print("interrupted: what had compiled is kept", highlight=False)
        code = EXIT_INTERRUPTED
    except GraphKilnError as error:
        _report_error(error)
        code = error.exit_code
    code = code if isinstance(code, int) else 0
    if _server_lost.is_set():
        # At its exit Prefect would try for minutes to send what it has to a server that is not there.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(graphkiln.__version__, package_name="graphkiln")
def cli() -> None:
    """Compile machine-learning networks for large clusters as explicit, content-addressed stages."""


def _store_options(command: Command) -> Command:
    command = click.option(
        "--storage-option", "options", multiple=True, metavar="KEY=VALUE", help="What fsspec passes to the store."
    )(command)
    return click.option(
        "--store", metavar="URL", help="Where the store is. [default: $GRAPHKILN_STORE or the cache folder]"
    )(command)


_target_option = click.option("--target", metavar="NAME", help="One of the targets. [default: the only or first one]")
_variant_option = click.option("--variant", default="", metavar="PREFIX", help="How the variant's digest starts.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")


@cli.command("compile")
@click.argument("spec", type=click.Path(path_type=Path))
@_target_option
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Set a parameter of the network.")
@click.option("--ranks", metavar="RANKS", help="Compile only what these ranks need, such as 13 or 0-15,32.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at once on this host. [default: cores]")
@click.option("--no-prefect", is_flag=True, help="Run the stages without Prefect.")
@_store_options
@_json_option
def compile_command(
    spec: Path,
    target: str | None,
    assignments: tuple[str, ...],
    ranks: str | None,
    jobs: int | None,
    no_prefect: bool,
    store: str | None,
    options: tuple[str, ...],
    as_json: bool,
) -> int:
    """Compile the network in SPEC, a TOML file, for one target, and commit it."""
    with (
        _errors_as_json(as_json),
        Workers(jobs) as workers,
        interruptible(workers.close),
        _progress(as_json) as progress,
    ):
        session = open_session(
            spec,
            workers,
            target=target,
            parameters=dict(parse_assignment(item) for item in assignments),
            store=store,
            storage_options=_storage_options(options),
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
        _print_json({"committed": report.manifest is not None, "backend": backend, **_jsonable(report)})
    else:
        print_report(_out, report, session.resolved.target.backend)
    if report.failed:
        return CompileFailedError.exit_code
    return 0 if report.manifest is not None else NotCommittedError.exit_code


@cli.command("status")
@click.argument("network", required=False)
@_target_option
@_store_options
@_json_option
def status_command(
    network: str | None, target: str | None, store: str | None, options: tuple[str, ...], as_json: bool
) -> int:
    """List what the store holds: every variant of NETWORK, or of all networks."""
    with _errors_as_json(as_json):
        opened = _open(store, options)
        if target is not None and network is None:
            raise BadInputError("--target needs a NETWORK", reason="bad-option")
        variants = variants_of(opened, _name_of(network) if network else None, target)
    if as_json:
        _print_json({"store": opened.url, "variants": _jsonable(variants)})
    elif variants:
        print_variants(_out, variants)
    else:
        _out.print(f"the store {opened.url} is empty", highlight=False, soft_wrap=True)
    return DamagedStoreError.exit_code if any(variant.damage for variant in variants) else 0


@cli.command("show")
@click.argument("network")
@_target_option
@_variant_option
@_store_options
@_json_option
def show_command(
    network: str, target: str | None, variant: str, store: str | None, options: tuple[str, ...], as_json: bool
) -> int:
    """Show the kernel graphs of every variant of NETWORK, a name or a spec."""
    with _errors_as_json(as_json):
        opened = _open(store, options)
        variants = variants_of(opened, _name_of(network), target, variant)
    if as_json:
        _print_json({"store": opened.url, "variants": _jsonable(variants)})
    else:
        for item in variants:
            print_graphs(_out, item)
            _out.print()
    return DamagedStoreError.exit_code if any(item.damage for item in variants) else 0


@cli.command("verify")
@_store_options
@_json_option
def verify_command(store: str | None, options: tuple[str, ...], as_json: bool) -> int:
    """Read every object of the store and check every digest. Changes nothing."""
    with _errors_as_json(as_json):
        opened = _open(store, options, checked=False)
        found = verify_store(opened)
    if as_json:
        _print_json({"store": opened.url, "damaged": found.damaged, **_jsonable(found)})
    else:
        print_verification(_out, found, opened.url)
    return DamagedStoreError.exit_code if found.damaged else 0


@cli.command("explain")
@click.argument("network")
@_target_option
@_store_options
@_json_option
def explain_command(
    network: str, target: str | None, store: str | None, options: tuple[str, ...], as_json: bool
) -> int:
    """Say why each kernel graph of NETWORK was a hit or a miss: what its key has that the plan before had not."""
    with _errors_as_json(as_json):
        found = explain(_open(store, options), _name_of(network), target)
    if as_json:
        _print_json(_jsonable(found))
    else:
        print_explanation(_out, found)
    return 0


@cli.command("log")
@click.argument("network")
@click.argument("graph")
@_target_option
@_variant_option
@_store_options
def log_command(
    network: str, graph: str, target: str | None, variant: str, store: str | None, options: tuple[str, ...]
) -> int:
    """Print what the compiler said of one kernel GRAPH of NETWORK: of its failure, or of its success."""
    log = compiler_log(_open(store, options), _name_of(network), graph, target, variant)
    if log:
        _print(log)
    else:
        _err.print(f"the compiler printed nothing for {graph}", markup=False, highlight=False)
    return 0


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
            _server_lost.set()
    except CompileFailedError:
        if not session.reported:
            raise
    except BadInputError as error:
        if error.reason == "prefect-server":
            _server_lost.set()
        raise


def _progress(as_json: bool) -> contextlib.AbstractContextManager[ConsoleProgress | None]:
    return contextlib.nullcontext() if as_json else ConsoleProgress(_out)


@contextlib.contextmanager
def _errors_as_json(as_json: bool) -> Iterator[None]:
    try:
        yield
    except GraphKilnError as error:
        if as_json:
            _print_json_error(error.reason, str(error), retryable=error.retryable)
        raise


def _report_error(error: GraphKilnError) -> None:
    _err.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True, style="red")


def _open(store: str | None, options: tuple[str, ...], *, checked: bool = True) -> Store:
    return open_store(store or default_url(), _storage_options(options), checked=checked)


def _storage_options(options: tuple[str, ...]) -> dict[str, Any]:
    return dict(parse_assignment(item) for item in options)


def _name_of(network: str) -> str:
    """Return a network's name, given its name or its spec."""
    return load_spec(network).name if network.endswith(".toml") else network


def _jsonable(value: object) -> Any:
    return msgspec.to_builtins(value)


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _out.on_broken_pipe()


def _print_json(document: object) -> None:
    _print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())


def _print_json_error(reason: str, message: str, *, retryable: bool = False) -> None:
    _print_json({"error": {"reason": reason, "message": message, "retryable": retryable}})
