"""``python -m benchmarks.catalog_steps STEP FOLDER``: one step of part catalog, in a process of its own.

Prints its seconds, wall and CPU, without imports, and the most megabytes that the process had resident.
"""

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Cost
from graphkiln.flows.report import report_on
from graphkiln.storage.catalog import CatalogRow, schema, write_part
from graphkiln.storage.compaction import compact_catalog
from graphkiln.storage.digests import Digest
from graphkiln.storage.leases import Leases
from graphkiln.storage.store import open_store

RUNS, GRAPHS, NETWORKS = 1000, 1000, 20
MISSES = 0.05
# What the catalogue asks of pyarrow, so that both sides write alike.
WRITE: dict[str, Any] = {"compression": "zstd", "compression_level": 3, "row_group_size": 2**17, "store_schema": False}


def runs() -> Iterator[list[CatalogRow]]:
    """Yield the rows of a thousand runs, fifty of each network; one kernel graph in twenty is new each time."""
    choose = random.Random(0)  # noqa: S311
    made: dict[tuple[int, int], dict[str, Any]] = {}
    for number in range(RUNS):
        network, now = number % NETWORKS, datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=number)
        run, variant = choose.randbytes(16), Digest(f"{network:064x}")
        rows = []
        for graph in range(GRAPHS):
            missed = (network, graph) not in made or choose.random() < MISSES
            if missed:
                made[network, graph] = _compile(choose, now)
            rows.append(
                CatalogRow(
                    time=now,
                    run=run,
                    network=f"network-{network}",
                    target="tpu-v5e",
                    variant=variant,
                    kernel_graph=f"stage_{graph}",
                    ranks=f"{8 * graph}-{8 * graph + 7}",
                    rank_count=8,
                    outcome="compiled" if missed else "cached",
                    **made[network, graph],
                )
            )
        yield rows


def _compile(choose: random.Random, now: datetime) -> dict[str, Any]:
    size = choose.randrange(10**5, 10**8)
    return {
        "action_key": Digest(choose.randbytes(32).hex()),
        "artifact": Digest(choose.randbytes(32).hex()),
        "bytes": size,
        "stored_bytes": size // choose.randrange(5, 25),
        "compile_seconds": choose.expovariate(1 / 20),
        "peak_memory_bytes": choose.randrange(10**9, 10**10),
        "host": f"host-{choose.randrange(64)}",
        "compiled_at": now - timedelta(seconds=choose.random() * 60),
    }


def write(folder: Path) -> dict[str, float]:
    """Write each run's rows by the catalogue, and as a file by pyarrow alone, in turns."""
    store, plain = open_store(str(folder / "store")), folder / "plain"
    plain.mkdir()
    ours = theirs = Cost(0.0, 0.0)
    for number, rows in enumerate(runs()):
        records = [_plain(row) for row in rows]
        started = _now()
        write_part(store, rows)
        between = _now()
        pq.write_table(pa.Table.from_pylist(records, schema()), plain / f"{number:04}.parquet", **WRITE)
        ours, theirs = ours.plus(between - started), theirs.plus(_now() - between)
    return {"wall": ours.wall, "cpu": ours.cpu, "plain_wall": theirs.wall, "plain_cpu": theirs.cpu}


def _plain(row: CatalogRow) -> dict[str, Any]:
    digests = ("variant", "action_key", "artifact")
    return {
        name: bytes.fromhex(value) if name in digests else value for name, value in msgspec.structs.asdict(row).items()
    }


def compact(folder: Path) -> object:
    store = open_store(str(folder / "store"))
    with Leases(store) as leases:
        return compact_catalog(store, leases, tell_waiting=print)


def plain_compact(folder: Path) -> object:
    return pq.write_table(pq.read_table(folder / "plain"), folder / "plain.parquet", **WRITE)


def report(folder: Path) -> object:
    return report_on(open_store(str(folder / "store")))


def plain_read(folder: Path) -> object:
    return pq.read_table(folder / "store" / "catalog")


STEPS: dict[str, Callable[[Path], object]] = {
    step.__name__: step for step in (write, compact, plain_compact, report, plain_read)
}


def _now() -> Cost:
    return Cost(time.perf_counter(), time.process_time())


def main() -> None:
    """Run the step that is named, and print what it took."""
    step, folder = sys.argv[1:]
    started = _now()
    told = STEPS[step](Path(folder))
    cost = _now() - started
    found = {"wall": cost.wall, "cpu": cost.cpu} | (told if isinstance(told, dict) else {})
    print(json.dumps({**found, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
