"""The command line. Exit codes are those of `graphkiln.storage.errors`; 130 is Ctrl-C, 1 a bug of ours."""

import os
import sys

import click

import graphkiln
from graphkiln.flows.commands.bundles import export_command, import_command
from graphkiln.flows.commands.catalog import catalog_group, report_command
from graphkiln.flows.commands.collection import gc_command, pin_command, rm_command, unpin_command
from graphkiln.flows.commands.common import err, print_json_error, report_error
from graphkiln.flows.commands.compilation import compile_command, server_lost
from graphkiln.flows.commands.inspection import (
    explain_command,
    log_command,
    show_command,
    status_command,
    verify_command,
)
from graphkiln.flows.commands.keys import keys_group
from graphkiln.flows.console import warnings_to
from graphkiln.storage.errors import GraphKilnError

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
  7    not trusted: no trusted key has signed it, or an older commit was put back
  130  interrupted; what had compiled is kept
"""


def main() -> None:
    """Run the command line and exit."""
    warnings_to(err)
    try:
        code = cli.main(prog_name="graphkiln", standalone_mode=False)
    except click.ClickException as error:
        if "--json" in sys.argv:
            print_json_error("usage", error.format_message())
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        told = f"interrupted: {str(error.__cause__ or error) or 'what had compiled is kept'}"
        if "--json" in sys.argv:
            print_json_error("interrupted", told, retryable=True)
        err.print(told, highlight=False)
        code = EXIT_INTERRUPTED
    except GraphKilnError as error:
        report_error(error)
        code = error.exit_code
    code = code if isinstance(code, int) else 0
    if server_lost.is_set():
        # At its exit Prefect would try for minutes to send what it has to a server that is not there.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(graphkiln.__version__, package_name="graphkiln")
def cli() -> None:
    """Compile machine-learning networks for large clusters as explicit, content-addressed stages."""


_COMMANDS = (
    *(compile_command, status_command, show_command, explain_command, log_command, verify_command),
    *(gc_command, rm_command, pin_command, unpin_command, export_command, import_command, keys_group),
    *(report_command, catalog_group),
)
for command in _COMMANDS:
    cli.add_command(command)
