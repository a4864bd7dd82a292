"""``python -m benchmarks [PART…]``: run the parts that are named, or all, and print their tables."""

import argparse
import os
import platform
import tempfile
import time
from importlib import metadata
from pathlib import Path

from benchmarks import bulk, catalog, cold, imports, large_store, rerun, verified_read, warm, warm_s3
from benchmarks.workspace import Workspace

PARTS = {
    "a": cold,
    "b": warm,
    "c": imports,
    "d": rerun,
    "bulk": bulk,
    "catalog": catalog,
    "large_store": large_store,
    "verified_read": verified_read,
    "warm_s3": warm_s3,
}


def main() -> None:
    """Run the benchmarks in a temporary folder."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="GraphKiln beside what one would do without it."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them if none is named")
    parts = list(dict.fromkeys(parser.parse_args().parts)) or list(PARTS)
    for part in parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: choose from {', '.join(PARTS)}")
    started = time.monotonic()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("graphkiln", "jax", "prefect"))
    print(f"Python {platform.python_version()}, {versions}; {len(os.sched_getaffinity(0))} cores, load {_load()}")
    print("Each figure is the least of its rounds. CPU seconds are those of the whole process tree.", flush=True)
    with tempfile.TemporaryDirectory(prefix="graphkiln-benchmarks-") as folder:
        workspace = Workspace(Path(folder))
        for part in parts:
            print(f"\n{PARTS[part].measure(workspace).text()}", flush=True)
    print(f"\n{time.monotonic() - started:.0f} s in all, load at the end {_load()}")


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
