"""Commands that say what a store is to keep: gc, rm, pin, unpin."""

from collections.abc import Callable
from typing import TypeVar

import click
from rich.status import Status

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
from graphkiln.flows.console import print_collection
from graphkiln.flows.inspection import variant_names
from graphkiln.storage import layout
from graphkiln.storage.collection import Collector
from graphkiln.storage.pins import pin_variant, remove_variant, unpin_variant
from graphkiln.storage.quantities import parse_duration, retention_policy
from graphkiln.storage.records import VariantName
from graphkiln.storage.store import Store

Answer = TypeVar("Answer")


_targets_option = click.option("--target", metavar="NAME", help="Only of this target. [default: all targets]")


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would be taken away.")
@click.option(
    "--keep-last", type=click.IntRange(min=1), help="Of each network and target, keep only the N variants used last."
)
@click.option("--older-than", metavar="DURATION", help="Drop variants that no run has used for so long, such as 30d.")
@click.option("--max-size", metavar="SIZE", help="Drop the variants used longest ago until the store fits in 200GB.")
@click.option(
    "--grace",
    metavar="DURATION",
    default="1d",
    show_default=True,
    help="Keep whatever was written or replaced within this time.",
)
@store_options
@json_option
def gc_command(
    dry_run: bool,
    keep_last: int | None,
    older_than: str | None,
    max_size: str | None,
    grace: str,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """Take away what no variant and no pin needs, and variants that an option drops.

    What running compiles and trainers use is pinned by them, and stays. Without an option, no variant is dropped.
    """
    with errors_as_json(as_json):
        policy = retention_policy(keep_last=keep_last, older_than=older_than, max_size=max_size, grace=grace)
        opened = store.open_existing(for_writing=not dry_run)
        with Status("reading the store", console=out) as status:
            if as_json or not out.is_terminal:
                status.stop()
            collector = Collector(opened, policy, tell=status.update)
            found = collector.plan() if dry_run else collector.run()
    if as_json:
        print_json({"store": opened.url, **jsonable(found)})
    else:
        print_collection(out, found, opened.url)
    return 0


@click.command("rm")
@click.argument("network")
@_targets_option
@variant_option
@store_options
@json_option
def rm_command(
    network: str,
    target: str | None,
    variant: str,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """Remove variants of NETWORK: those that --target and --variant name, or all of them.

    Nothing loads them from now on. What only they needed is taken away by `gc`, at the earliest a day later.
    """
    return _for_each_variant(
        "removed",
        remove_variant,
        (layout.PLANS, layout.REFS),
        network,
        target,
        variant,
        store,
        as_json=as_json,
    )


@click.command("pin")
@click.argument("network")
@_targets_option
@variant_option
@click.option("--for", "life", metavar="DURATION", help="How long the pin holds, such as 12h. [default: until unpin]")
@click.option("--reason", default="pinned by hand", show_default=True, help="What to tell whoever asks.")
@store_options
@json_option
def pin_command(
    network: str,
    target: str | None,
    variant: str,
    life: str | None,
    reason: str,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """Keep committed variants of NETWORK from being dropped, and what they name now from being taken away."""

    def pin(opened: Store, name: VariantName) -> bool:
        pin_variant(opened, name, reason=reason, life=None if life is None else parse_duration(life))
        return True

    return _for_each_variant("pinned", pin, (layout.REFS,), network, target, variant, store, as_json=as_json)


@click.command("unpin")
@click.argument("network")
@_targets_option
@variant_option
@store_options
@json_option
def unpin_command(
    network: str,
    target: str | None,
    variant: str,
    store: StoreLocation,
    as_json: bool,
) -> int:
    """Take the pins of NETWORK away that `pin` made."""
    return _for_each_variant(
        "unpinned",
        unpin_variant,
        (layout.KEPT_PINS,),
        network,
        target,
        variant,
        store,
        as_json=as_json,
    )


def _for_each_variant(
    done: str,
    act: Callable[[Store, VariantName], bool],
    folders: tuple[str, ...],
    network: str,
    target: str | None,
    variant: str,
    store: StoreLocation,
    *,
    as_json: bool,
) -> int:
    with errors_as_json(as_json):
        opened = store.open_existing()
        names = [
            name for name in variant_names(opened, folders, name_of(network), target, variant) if act(opened, name)
        ]
    if as_json:
        print_json({"store": opened.url, done: [dict(zip(_KEYS, name, strict=True)) for name in names]})
    for name, of, digest in names if not as_json else []:
        out.print(f"{done} {name} for {of} (variant {digest[:12]})", highlight=False, soft_wrap=True)
    return 0


_KEYS = ("network", "target", "variant")
