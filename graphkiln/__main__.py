"""`python -m graphkiln` and the command `graphkiln`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it as quietly as later."""
    try:
        from graphkiln.flows.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
