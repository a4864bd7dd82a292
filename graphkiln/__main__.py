"""`python -m graphkiln` is the command line."""

from graphkiln.flows.cli import main

if __name__ == "__main__":
    main()
