"""Calls `ensure` in many processes at the same moment, each of which prints what it got as a line of JSON.

``python simultaneous_runs.py COUNT SPEC STORE STORAGE_OPTIONS``. The processes are forked once what they need is
imported, and wait for each other: from nothing, the first would be done before the last has imported it.
"""

import importlib
import json
import multiprocessing
import os
import sys
from threading import Barrier
from typing import Any

import graphkiln
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.documents import seal

# What `ensure` imports when it is called, and fsspec for a store on S3.
NEEDED = ["graphkiln.flows.direct", "graphkiln.tasks.session", "graphkiln.tasks.workers"]
NEEDED_FOR_S3 = ["s3fs"]
START_SECONDS = 60


def main(count: int, spec: str, store: str, storage_options: dict[str, Any]) -> None:
    for name in NEEDED + (NEEDED_FOR_S3 if store.startswith("s3:") else []):
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(count)
    runs = [fork.Process(target=run, args=(barrier, spec, store, storage_options)) for _ in range(count)]
    for process in runs:
        process.start()
    for process in runs:
        process.join()
    sys.exit(any(process.exitcode for process in runs))


def run(barrier: Barrier, spec: str, store: str, storage_options: dict[str, Any]) -> None:
    barrier.wait(START_SECONDS)
    network = graphkiln.ensure(spec, store=store, storage_options=storage_options, jobs=2)
    found = {
        "manifest": digest_bytes(seal("manifest", network.manifest)),
        "outputs": {graph: sorted(network.load(graph).outputs) for graph in network.graphs()},
    }
    # In one piece, so that no line is torn.
    os.write(1, f"{json.dumps(found)}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
