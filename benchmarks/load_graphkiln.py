"""Loads all kernel graphs of Mixtral from a store; prints what that took beyond JAX's import and devices."""

import sys

import jax

from benchmarks.process_clock import ProcessClock
from benchmarks.workspace import NETWORK, TARGET


def main() -> None:
    """Load from the store that the command line names."""
    jax.devices()
    clock = ProcessClock()
    import graphkiln

    network = graphkiln.load(NETWORK, target=TARGET, store=sys.argv[1])
    ready = [network.load(graph) for graph in network.graphs()]
    clock.print_seconds()
    if len(ready) != 8:
        raise RuntimeError(f"{len(ready)} kernel graphs instead of 8")


if __name__ == "__main__":
    main()
