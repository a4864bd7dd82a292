"""The commands `export` and `import`: committed networks in one file, for clusters without a network."""

import contextlib
from collections.abc import Iterator
from datetime import datetime

import click
from rich.filesize import decimal

from graphkiln.flows.bundles import ExportedBundle, ImportedBundle, export_bundle, import_bundle
from graphkiln.flows.commands.common import (
    StoreLocation,
    errors_as_json,
    json_option,
    jsonable,
    name_of,
    out,
    print_json,
    store_options,
    variant_option,
)
from graphkiln.flows.interrupts import interruptible
from graphkiln.storage.bundles import BundledVariant, ImportState, Progress

_STYLES: dict[ImportState, str] = {"added": "green", "updated": "green", "unchanged": "cyan", "kept": "yellow"}


@click.command("export")
@click.argument("networks", metavar="NETWORK...", nargs=-1, required=True)
@click.option("-o", "--output", "file", required=True, metavar="FILE", help="The bundle to write.")
@click.option("--target", metavar="NAME", help="Only of this target. [default: all targets]")
@variant_option
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@store_options
@json_option
def export_command(
    networks: tuple[str, ...],
    file: str,
    target: str | None,
    variant: str,
    force: bool,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """Write all that is committed of each NETWORK, a name or a spec, to one file that `import` reads."""
    with errors_as_json(as_json), _interruptible("nothing was exported"), _progress("exporting", as_json) as progress:
        made = export_bundle(
            [name_of(network) for network in networks],
            file,
            target=target,
            variant=variant,
            overwrite=force,
            store=store.url,
            storage_options=store.parsed_options(),
            trusted_keys=store.trusted_keys or None,
            progress=progress,
        )
    if as_json:
        print_json(jsonable(made))
    else:
        _print_export(made)
    return 0


@click.command("import")
@click.argument("file")
@store_options
@json_option
def import_command(file: str, store: StoreLocation, as_json: bool) -> int:
    """Put all that the bundle FILE holds into the store, once all of it has been checked."""
    interrupted = "what had been committed is whole; import again for the rest"
    with errors_as_json(as_json), _interruptible(interrupted), _progress("importing", as_json) as progress:
        made = import_bundle(
            file,
            store=store.url,
            storage_options=store.parsed_options(),
            trusted_keys=store.trusted_keys or None,
            progress=progress,
        )
    if as_json:
        print_json(jsonable(made))
    else:
        _print_import(made)
    return 0


def _print_export(made: ExportedBundle) -> None:
    for item in made.variants:
        out.print(f"  {_title(item)}, committed {_local(item.committed_at)}", highlight=False, soft_wrap=True)
    for left in made.left_out:
        told = f"{left.network} for {left.target} (variant {left.variant[:12]}): {left.state}"
        out.print(f"  [yellow]left out[/] {told}", highlight=False, soft_wrap=True)
    count = "1 committed variant" if len(made.variants) == 1 else f"{len(made.variants)} committed variants"
    told = f"{made.file}: {count}, {made.objects} objects, {decimal(made.bytes)}"
    out.print(told, markup=False, highlight=False, soft_wrap=True)


def _print_import(made: ImportedBundle) -> None:
    for item in made.variants:
        note = "; the store has a newer commit, which stays" if item.state == "kept" else ""
        told = f"{_title(item)}, committed {_local(item.committed_at)}{note}"
        out.print(f"  [{_STYLES[item.state]}]{item.state:9}[/] {told}", highlight=False, soft_wrap=True)
    told = f"{made.store}: {made.new_objects} of {made.objects} objects of {made.file} were new"
    out.print(told, markup=False, highlight=False, soft_wrap=True)


def _title(item: BundledVariant) -> str:
    return f"{item.network} for {item.target} (variant {item.variant[:12]})"


def _local(moment: datetime) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"


@contextlib.contextmanager
def _interruptible(told: str) -> Iterator[None]:
    try:
        with interruptible(lambda: None):
            yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(told) from None


@contextlib.contextmanager
def _progress(what: str, as_json: bool) -> Iterator[Progress | None]:
    """Show a bar while it lasts, on a terminal."""
    if as_json or not out.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    with Bars(
        TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=out, transient=True
    ) as bars:
        bar = bars.add_task(what)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
