"""What the commands share: options, opening a store, and how results and errors are printed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click
import msgspec
import orjson
from rich.console import Console

from graphkiln.flows.console import PipeConsole
from graphkiln.storage.errors import GraphKilnError
from graphkiln.storage.locations import default_url
from graphkiln.storage.store import Store, open_store
from graphkiln.tasks.spec import load_spec, parse_assignment

Command = TypeVar("Command", bound=Callable[..., Any])

out = PipeConsole()
err = Console(stderr=True)


def store_options(command: Command) -> Command:
    """Add the options that name a store."""
    command = click.option(
        "--storage-option", "options", multiple=True, metavar="KEY=VALUE", help="What fsspec passes to the store."
    )(command)
    return click.option(
        "--store", metavar="URL", help="Where the store is. [default: $GRAPHKILN_STORE or the cache folder]"
    )(command)


target_option = click.option("--target", metavar="NAME", help="One of the targets. [default: the only or first one]")
variant_option = click.option("--variant", default="", metavar="PREFIX", help="How the variant's digest starts.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")


@contextlib.contextmanager
def errors_as_json(as_json: bool) -> Iterator[None]:
    """Print an error as a JSON document as well, if that is what the caller reads."""
    try:
        yield
    except GraphKilnError as error:
        if as_json:
            print_json_error(error.reason, str(error), retryable=error.retryable)
        raise


def report_error(error: GraphKilnError) -> None:
    """Print an error for people."""
    err.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True, style="red")


def open_named_store(store: str | None, options: tuple[str, ...], *, checked: bool = True) -> Store:
    """Return the store that the options name, or the default one, without writing to it."""
    return open_store(store or default_url(), storage_options(options), checked=checked)


def storage_options(options: tuple[str, ...]) -> dict[str, Any]:
    """Return what ``--storage-option`` gave."""
    return dict(parse_assignment(item) for item in options)


def name_of(network: str) -> str:
    """Return a network's name, given its name or its spec."""
    return load_spec(network).name if network.endswith(".toml") else network


def jsonable(value: object) -> Any:
    """Return a value that `print_json` takes."""
    return msgspec.to_builtins(value)


def print_text(text: str) -> None:
    """Print to a reader that may go away."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        out.on_broken_pipe()


def print_json(document: object) -> None:
    """Print one JSON document."""
    print_text(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())


def print_json_error(reason: str, message: str, *, retryable: bool = False) -> None:
    """Print an error as a JSON document."""
    print_json({"error": {"reason": reason, "message": message, "retryable": retryable}})
