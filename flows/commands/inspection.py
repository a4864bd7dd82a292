"""Commands that look at a store and change nothing: status, show, explain, log, verify."""

from collections.abc import Sequence

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
    target_option,
    variant_option,
)
from graphkiln.flows.console import print_explanation, print_graphs, print_variants, print_verification
from graphkiln.flows.inspection import VariantStatus, compiler_log, explain, variants_of
from graphkiln.storage.errors import BadInputError, DamagedStoreError, UntrustedError
from graphkiln.storage.verify import verify_store


@click.command("status")
@click.argument("network", required=False)
@target_option
@store_options
@json_option
def status_command(
    network: str | None,
    target: str | None,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """List what the store holds: every variant of NETWORK, or of all networks."""
    with errors_as_json(as_json):
        opened = store.open()
        if target is not None and network is None:
            raise BadInputError("--target needs a NETWORK", reason="bad-option")
        variants = variants_of(opened, name_of(network) if network else None, target)
    if as_json:
        print_json({"store": opened.url, "variants": jsonable(variants)})
    elif variants:
        print_variants(out, variants)
    else:
        out.print(f"the store {opened.url} is empty", highlight=False, soft_wrap=True)
    return _exit_code(variants)


@click.command("show")
@click.argument("network")
@target_option
@variant_option
@store_options
@json_option
def show_command(
    network: str,
    target: str | None,
    variant: str,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """Show the kernel graphs of every variant of NETWORK, a name or a spec."""
    with errors_as_json(as_json):
        opened = store.open()
        variants = variants_of(opened, name_of(network), target, variant)
    if as_json:
        print_json({"store": opened.url, "variants": jsonable(variants)})
    else:
        for item in variants:
            print_graphs(out, item)
            out.print()
    return _exit_code(variants)


@click.command("verify")
@store_options
@json_option
def verify_command(store: StoreLocation, as_json: bool) -> int:
    """Read every object of the store and check every digest. Changes nothing."""
    with errors_as_json(as_json):
        opened = store.open(checked=False)
        found = verify_store(opened)
    if as_json:
        print_json({"store": opened.url, "damaged": found.damaged, "untrusted": found.untrusted, **jsonable(found)})
    else:
        print_verification(out, found, opened.url)
    return DamagedStoreError.exit_code if found.damaged else UntrustedError.exit_code if found.untrusted else 0


@click.command("explain")
@click.argument("network")
@target_option
@store_options
@json_option
def explain_command(
    network: str,
    target: str | None,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """Say why each kernel graph of NETWORK was a hit or a miss: what its key has that the plan before had not."""
    with errors_as_json(as_json):
        found = explain(store.open(), name_of(network), target)
    if as_json:
        print_json(jsonable(found))
    else:
        print_explanation(out, found)
    return 0


@click.command("log")
@click.argument("network")
@click.argument("graph")
@target_option
@variant_option
@store_options
def log_command(
    network: str,
    graph: str,
    target: str | None,
    variant: str,
    store: StoreLocation,
) -> int:
    """Print what the compiler said of one kernel GRAPH of NETWORK: of its failure, or of its success."""
    log = compiler_log(store.open(), name_of(network), graph, target, variant)
    if log:
        print(log)
    else:
        err.print(f"the compiler printed nothing for {graph}", markup=False, highlight=False)
    return 0


def _exit_code(variants: Sequence[VariantStatus]) -> int:
    wrong = [variant.state for variant in variants if variant.damage]
    return DamagedStoreError.exit_code if "damaged" in wrong else UntrustedError.exit_code if wrong else 0
