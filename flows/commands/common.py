"""What the commands share: options, opening a store, and how results and errors are printed."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click
import msgspec
import orjson
from rich.console import Console

from graphkiln.flows.console import PipeConsole
from graphkiln.storage.errors import BadInputError, GraphKilnError
from graphkiln.storage.store import Store, open_for_writing, open_store
from graphkiln.tasks.spec import load_spec, parse_assignment

out = PipeConsole()
err = Console(stderr=True)


class StoreLocation(NamedTuple):
    """Which store the options of a command name, and whose signatures count in it.

    Attributes:
        url: where it is, as the user gave it; None for the default one.
        options: what fsspec passes to its file system, as ``key=value``.
        trusted_keys: files of public keys.
    """

    url: str | None
    options: tuple[str, ...]
    trusted_keys: tuple[str, ...]

    def parsed_options(self) -> dict[str, Any]:
        """Return the options by name.

        Raises:
            BadInputError: one is not of the form ``key=value``.
        """
        return dict(parse_assignment(item) for item in self.options)

    def open(self, *, checked: bool = True) -> Store:
        """Return the store, without writing to it."""
        return open_store(self.url, self.parsed_options(), checked=checked, trusted_keys=self.trusted_keys or None)

    def open_existing(self, *, for_writing: bool = True) -> Store:
        """Return the store, which must be there: none is made only to be looked at.

        Raises:
            BadInputError: there is none.
        """
        opened = self.open()
        if opened.read_format() is None:
            raise BadInputError(f"there is no store at {opened.url}", reason="no-store")
        if not for_writing:
            return opened
        return open_for_writing(self.url, self.parsed_options(), trusted_keys=self.trusted_keys or None)


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name a store and say whose signatures count in it, as one argument `store`."""

    @click.option("--store", metavar="URL", help="Where the store is. [default: $GRAPHKILN_STORE or the cache folder]")
    @click.option(
        "--storage-option", "options", multiple=True, metavar="KEY=VALUE", help="What fsspec passes to the store."
    )
    @click.option(
        "--trusted-keys",
        multiple=True,
        metavar="FILE",
        help="Public keys, one a line: nothing counts that none of them signed. [default: $GRAPHKILN_TRUSTED_KEYS]",
    )
    @functools.wraps(command)
    def with_location(
        *arguments: Any, store: str | None, options: tuple[str, ...], trusted_keys: tuple[str, ...], **more: Any
    ) -> Any:
        return command(*arguments, store=StoreLocation(store, options, trusted_keys), **more)

    return with_location


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
