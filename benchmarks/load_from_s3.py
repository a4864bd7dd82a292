"""Loads the kernel graphs of a network as one rank does; prints what that took."""

import json
import sys

from benchmarks.process_clock import ProcessClock


def main() -> None:
    """Load from the store, with the options and of the network that the command line names."""
    store, options, name, target = sys.argv[1:]
    clock = ProcessClock()
    import graphkiln

    network = graphkiln.load(name, target=target, store=store, storage_options=json.loads(options))
    ready = network.load_all()
    clock.print_seconds()
    if len(ready) != 8:
        raise RuntimeError(f"{len(ready)} kernel graphs instead of 8")


if __name__ == "__main__":
    main()
