"""The command line. Exit codes are those of `graphkiln.storage.errors`; 130 is Ctrl-C, 1 a bug of ours."""

import os
import sys

import click

import graphkiln
from graphkiln.flows.commands.catalog import catalog_group, report_command
from graphkiln.flows.commands.common import err, print_json_error, report_error
from graphkiln.flows.commands.compilation import compile_command, server_lost
from graphkiln.flows.commands.inspection import (
    explain_command,
    log_command,
    show_command,
    status_command,
    verify_command,
)
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
    except (click.Abort, KeyboardInterrupt):
        if "--json" in sys.argv:
            print_json_error("interrupted", "interrupted: what had compiled is kept", retryable=True)
        err.print("interrupted: what had compiled is kept", highlight=False)
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


for command in (
    compile_command,
    status_command,
    show_command,
    explain_command,
    log_command,
    verify_command,
    report_command,
    catalog_group,
):
    cli.add_command(command)
