"""The commands of the catalogue: report, catalog compact."""

from datetime import UTC, datetime
from pathlib import Path

import click

from graphkiln.flows.commands.common import (
    StoreLocation,
    err,
    errors_as_json,
    json_option,
    jsonable,
    name_of,
    out,
    print_json,
    store_options,
)
from graphkiln.flows.report import report_on
from graphkiln.flows.report_page import write_page
from graphkiln.flows.report_text import print_catalog_report
from graphkiln.storage.compaction import compact_catalog
from graphkiln.storage.leases import Leases
from graphkiln.storage.quantities import parse_duration


@click.command("report")
@click.argument("network", required=False)
@click.option("--since", metavar="DURATION", help="Only runs of the last 12h, 30d or 4w. [default: all]")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with plots.")
@store_options
@json_option
def report_command(
    network: str | None,
    since: str | None,
    page: Path | None,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """Tell from the catalogue what the store has saved, for NETWORK or all networks, and what is slow and large."""
    with errors_as_json(as_json):
        opened = store.open()
        start = datetime.now(UTC) - parse_duration(since) if since else None
        report = report_on(opened, name_of(network) if network else None, start)
        if page is not None:
            write_page(report, page)
    if as_json:
        print_json(jsonable(report))
    else:
        print_catalog_report(out, report)
        if page is not None:
            out.print(f"wrote {page}", markup=False, highlight=False, soft_wrap=True)
    return 0


@click.group("catalog")
def catalog_group() -> None:
    """Look after the catalogue, the table of all runs."""


@catalog_group.command("compact")
@store_options
@json_option
def compact_command(store: StoreLocation, as_json: bool) -> int:
    """Merge the many small files of the catalogue into a few large ones."""
    with errors_as_json(as_json):
        opened = store.open()
        with Leases(opened) as leases:
            done = compact_catalog(opened, leases, tell_waiting=_tell_waiting)
    if as_json:
        print_json({"store": opened.url, **jsonable(done)})
    else:
        repeated = f", {done.repeated_rows} repeated rows dropped" if done.repeated_rows else ""
        text = f"{opened.url}: {done.before} parts are now {done.after}, with {done.rows} rows{repeated}"
        out.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _tell_waiting(owner: str) -> None:
    err.print(f"waiting for {owner}, which compacts the catalogue", markup=False, highlight=False, soft_wrap=True)
