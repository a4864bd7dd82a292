"""(c) What a trainer pays before it asks for anything: the import and a local store."""

import sys

from benchmarks.measure import Cost, Table, both, least, rounds, run
from benchmarks.workspace import Workspace

GOAL = 1.3
ROUNDS = 25
BUDGET_SECONDS = 30.0


def measure(workspace: Workspace) -> Table:
    """Run the statements in turns, each in a fresh interpreter."""
    from graphkiln.storage.store import open_for_writing

    store = workspace.new("store")
    open_for_writing(str(store))
    statements = (
        f"import graphkiln; graphkiln.open_store({str(store)!r})",
        "import fsspec, orjson",
        "pass",
    )
    costs: tuple[list[Cost], ...] = ([], [], [])
    for _ in rounds(ROUNDS, BUDGET_SECONDS):
        for statement, found in zip(statements, costs, strict=True):
            found.append(run([sys.executable, "-P", "-c", statement], workspace.environment()).cost)
    ours, theirs, nothing = map(least, costs)
    return Table(
        f"(c) `import graphkiln` and opening a local store, {len(costs[0])} rounds",
        ("graphkiln", "fsspec, orjson"),
        [
            *both("whole process", ours, theirs, GOAL),
            *both("beyond an empty interpreter", ours - nothing, theirs - nothing),
        ],
    )
