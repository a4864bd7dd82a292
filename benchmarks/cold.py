"""(a) Cold compile through the Prefect flow, beside a bare JAX script."""

from benchmarks.measure import Cost, Row, Table, both, least, rounds
from benchmarks.workspace import JOBS, MIXTRAL, Workspace

GOAL = 1.10
ROUNDS = 3
BUDGET_SECONDS = 240.0


def measure(workspace: Workspace) -> Table:
    """Compile Mixtral in turns with both, and a tiny network with and without Prefect."""
    first_start, prefect = _prefect_start(workspace)
    flows: list[Cost] = []
    bare: list[Cost] = []
    seconds: list[float] = []
    for _ in rounds(ROUNDS, BUDGET_SECONDS):
        store = workspace.new("store")
        cost, report = workspace.compile(MIXTRAL, store)
        flows.append(cost)
        workspace.committed = store, report
        seconds.append(sum(graph["seconds"] for graph in report["graphs"]))
        script = workspace.script(
            "plain_jax", "compile", workspace.new("plain"), environment=workspace.jax_environment()
        )
        bare.append(script.cost)
    flow, plain = least(flows), least(bare)
    return Table(
        f"(a) Cold compile of eight Mixtral-8x7B kernel graphs for CPU x16, {JOBS} processes, {len(flows)} rounds",
        ("graphkiln", "bare JAX"),
        [
            *both("beyond Prefect's start", flow - prefect, plain, GOAL),
            *both("whole command", flow, plain),
            Row("Prefect's start and end: wall", prefect.wall),
            Row("Prefect's start and end: CPU", prefect.cpu),
            Row("  with a new database: wall", first_start.wall),
            Row("compile seconds that the outcomes report", min(seconds)),
        ],
    )


def _prefect_start(workspace: Workspace) -> tuple[Cost, Cost]:
    """Return what Prefect adds to a compile that takes no time: with a new database, and with one that is there."""
    spec = workspace.tiny_spec()
    with_prefect = [workspace.compile(spec, workspace.new("store"))[0] for _ in range(3)]
    without = least(workspace.compile(spec, workspace.new("store"), "--no-prefect")[0] for _ in range(3))
    return with_prefect[0] - without, least(with_prefect[1:]) - without
