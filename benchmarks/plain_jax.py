"""The eight programs with JAX alone, in fresh processes.

``compile FOLDER`` traces, lowers, compiles and serializes them in a pool of two processes that take the next program
when they are done with one; ``warm`` gets them from JAX's own persistent cache. Which cache, if any, is up to the
environment.
"""

import argparse
import functools
import multiprocessing
import pickle
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.process_clock import ProcessClock
from benchmarks.workspace import JOBS, MIXTRAL

PROGRAMS = (
    "first_fwd",
    "first_bwd",
    "first_opt",
    "mid_fwd",
    "mid_bwd",
    "mid_opt",
    "last_step",
    "last_opt",
)


def compile_all(folder: Path) -> None:
    """Compile the programs into files of a folder."""
    folder.mkdir()
    with ProcessPoolExecutor(JOBS, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(functools.partial(compile_one, folder), PROGRAMS):
            pass


def compile_one(folder: Path, name: str) -> None:
    """Compile one program into a file. Runs in a process of the pool."""
    from jax.experimental import serialize_executable

    (folder / name).write_bytes(pickle.dumps(serialize_executable.serialize(lowered(name).compile())))


def warm_start() -> None:
    """Make every program ready to run, and print what that took beyond the import of JAX and the start of devices."""
    import jax

    hits: list[str] = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
    )
    jax.devices()
    clock = ProcessClock()
    ready = [lowered(name).compile() for name in PROGRAMS]
    clock.print_seconds()
    if len(hits) != len(ready):
        raise RuntimeError(f"JAX's cache had {len(hits)} of {len(ready)} programs")


def lowered(name: str) -> Any:
    """Return a program as a `jax.stages.Lowered` on the devices of this process."""
    import jax

    program = programs()[name]
    jitted = jax.jit(
        program.function,
        donate_argnums=program.donate,
        out_shardings=jax.tree.map(on_devices, program.out_shardings),
    )
    arguments = jax.tree.map(
        lambda struct: jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=on_devices(struct.sharding)),
        program.arguments,
    )
    return jitted.lower(*arguments)


@functools.cache
def programs() -> Any:
    """Import the network, and return its programs."""
    sys.path.insert(0, str(MIXTRAL.parent))
    import network

    return network.programs(**tomllib.loads(MIXTRAL.read_text(encoding="utf-8"))["parameters"])


def on_devices(sharding: Any) -> Any:
    """Return the sharding on the devices of this process instead of an abstract mesh."""
    import jax
    import numpy as np

    abstract = sharding.mesh
    devices = np.array(jax.devices()).reshape(abstract.axis_sizes)
    mesh = jax.sharding.Mesh(devices, abstract.axis_names, axis_types=abstract.axis_types)
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("compile").add_argument("folder", type=Path)
    commands.add_parser("warm")
    options = parser.parse_args()
    if options.command == "compile":
        compile_all(options.folder)
    else:
        warm_start()


if __name__ == "__main__":
    main()
