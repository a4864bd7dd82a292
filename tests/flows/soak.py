"""One process of the soak test: a writer, a reader or a collector, until a given time. Prints what it did as JSON."""

import ctypes
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import graphkiln
from graphkiln.storage.collection import Collector
from graphkiln.storage.errors import NotCommittedError
from graphkiln.storage.retention import Policy
from graphkiln.storage.store import open_for_writing
from graphkiln.tasks.network import CompiledNetwork

NETWORKS = ["alpha", "beta", "gamma", "delta"]
TARGET = "native"
KERNELS = 3
CONSTANTS = 8
ARGUMENT = 1000

# Far shorter than in use, and longer than a reader takes from a ref to the artifacts that it names.
GRACE = timedelta(seconds=8)

_SPEC = """
[network]
name = "{name}"
frontend = "file"
entrypoint = "kernels/*.c"

[parameters]
ranks = "0-3"

[targets.native]
backend = "command"
argv = ["cc", "-O1", "-shared", "-fPIC", "{{input}}", "-o", "{{output}}"]
output_name = "kernel.so"
tools = ["as", "ld"]
"""


def call(network: CompiledNetwork, graph: str) -> int:
    """Load a kernel graph and run it."""
    with tempfile.TemporaryDirectory() as folder:
        path = network.load(graph).write_to(Path(folder) / graph)["kernel.so"]
        result: int = ctypes.CDLL(str(path)).run(ARGUMENT)
        return result


def write(store: str, folder: Path, number: int, until: float) -> Counter[str]:
    """Change a network at random, again and again, so that kernel graphs come back which may have been collected."""
    choice, done = random.Random(number), Counter[str]()  # noqa: S311
    name = NETWORKS[number % len(NETWORKS)]
    (folder / "kernels").mkdir(parents=True)
    spec = folder / f"{name}.toml"
    spec.write_text(_SPEC.format(name=name))
    while time.monotonic() < until:
        constants = {f"k{kernel}": choice.randrange(CONSTANTS) for kernel in range(KERNELS)}
        for kernel, constant in constants.items():
            source = f"int run(int x) {{ return x + {constant}; }}\n"
            (folder / "kernels" / f"{kernel}.c").write_text(source)
        network = graphkiln.ensure(spec, store=store, jobs=1)
        for kernel, constant in constants.items():
            if call(network, kernel) != ARGUMENT + constant:
                raise AssertionError(f"{name} {kernel}: wrong result")
        done["committed"] += 1
    return done


def read(store: str, number: int, until: float) -> Counter[str]:
    """Load a network again and again."""
    name, done = NETWORKS[number % len(NETWORKS)], Counter[str]()
    while time.monotonic() < until:
        try:
            network = graphkiln.load(name, target=TARGET, store=store)
        except NotCommittedError:
            if done["loaded"]:
                raise
            continue
        for graph in network.graphs():
            if not ARGUMENT <= call(network, graph) < ARGUMENT + CONSTANTS:
                raise AssertionError(f"{name} {graph}: wrong result")
        done["loaded"] += 1
    return done


def collect(store: str, until: float) -> Counter[str]:
    """Collect again and again."""
    done = Counter[str]()
    opened = open_for_writing(store)
    while time.monotonic() < until:
        found = Collector(opened, Policy(grace=GRACE)).run()
        done["collections"] += 1
        done["freed"] += sum(item.objects for item in found.freed)
    return done


def main(role: str, number: int, store: str, folder: str, seconds: float) -> None:
    """Play one role."""
    # That another run is just about to commit is no news here; every other warning fails the test.
    logging.getLogger("graphkiln").addFilter(lambda record: "is outdated" not in record.getMessage())
    until = time.monotonic() + seconds
    if role == "writer":
        done = write(store, Path(folder), number, until)
    elif role == "reader":
        done = read(store, number, until)
    else:
        done = collect(store, until)
    print(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5]))
