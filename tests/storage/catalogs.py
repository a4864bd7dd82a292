"""Rows of a catalogue for tests, made up but of the kind that runs write."""

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from graphkiln.storage.catalog import CatalogRow, read_catalog, schema, table_of
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.store import Store

START = datetime(2026, 1, 30, 22, 0, tzinfo=UTC)


def named(name: str) -> Digest:
    """A digest that is told by a word."""
    return digest_bytes(name.encode())


def row(run: str = "run", graph: str = "forward", outcome: str = "compiled", **changes: Any) -> CatalogRow:
    """A row of the run of that name; one that failed or was blocked has no artifact."""
    made = outcome in ("compiled", "cached")
    values: dict[str, Any] = {
        "time": START,
        "run": bytes.fromhex(named(run)[:32]),
        "network": "toy",
        "target": "host",
        "variant": named("variant"),
        "kernel_graph": graph,
        "ranks": "0-7",
        "rank_count": 8,
        "outcome": outcome,
        "action_key": named(graph),
        "artifact": named(f"artifact of {graph}") if made else None,
        "bytes": 1000 if made else None,
        "stored_bytes": 100 if made else None,
        "compile_seconds": None if outcome == "blocked" else 2.5,
        "peak_memory_bytes": None if outcome == "blocked" else 7000,
        "host": None if outcome == "blocked" else "host-a",
        "compiled_at": None if outcome == "blocked" else START - timedelta(microseconds=1),
    }
    return CatalogRow(**{**values, **changes})


def run_of(number: int, graphs: int = 3) -> list[CatalogRow]:
    """The rows of a run, an hour after that with the number before."""
    time = START + timedelta(hours=number)
    return [row(f"run {number}", f"graph-{graph}", "cached", time=time) for graph in range(graphs)]


def rows_in(store: Store) -> list[dict[str, Any]]:
    """All rows of a catalogue as dictionaries, in an order of their own."""
    found: list[dict[str, Any]] = read_catalog(store, schema().names).rows.to_pylist()
    return sorted(found, key=lambda item: (item["time"], item["run"], item["kernel_graph"]))


def expected(rows: Sequence[CatalogRow]) -> list[dict[str, Any]]:
    """What `rows_in` gives for these rows."""
    found: list[dict[str, Any]] = table_of(rows).to_pylist()
    return sorted(found, key=lambda item: (item["time"], item["run"], item["kernel_graph"]))


def history(runs: int, graphs: int, *, networks: int = 4) -> Iterator[list[CatalogRow]]:
    """The rows of many runs of some networks in turns.

    Most kernel graphs are cached. Neighbours have the same action, and each seventh one shares it with all networks.
    """
    choose = random.Random(0)  # noqa: S311
    made: dict[Digest, dict[str, Any]] = {}
    for number in range(runs):
        network, time = f"net-{number % networks}", START + timedelta(minutes=47 * number)
        rows = []
        for graph in range(graphs):
            owner = network if graph % 7 else "all"
            key = named(f"{owner} {graph // 2} {choose.randrange(10)}")
            outcome = "cached" if key in made and made[key]["compiled_at"] < time else "compiled"
            if key not in made and choose.randrange(10) == 0:
                outcome = choose.choice(["failed", "blocked"])
            elif key not in made:
                made[key] = {
                    "artifact": named(f"artifact of {key}"),
                    "bytes": choose.randrange(10**9),
                    "stored_bytes": choose.randrange(10**8),
                    # Halves, so that sums are the same in any order.
                    "compile_seconds": choose.randrange(10**6) / 2,
                    "peak_memory_bytes": choose.randrange(10**10),
                    "host": f"host-{choose.randrange(9)}",
                    "compiled_at": time,
                }
            about = made.get(key, {"compiled_at": time if outcome == "failed" else None})
            name = f"graph-{graph}"
            rows.append(row(f"run {number}", name, outcome, time=time, network=network, action_key=key, **about))
        yield rows
