"""(b) Warm `load` of all kernel graphs, beside JAX's own persistent compilation cache."""

from benchmarks.measure import Cost, Table, both, least, rounds
from benchmarks.process_clock import read_seconds
from benchmarks.workspace import Workspace

GOAL = 0.40
ROUNDS = 5
BUDGET_SECONDS = 90.0


def measure(workspace: Workspace) -> Table:
    """Fill both caches, then start from them in turns, each time in a fresh process."""
    store, _ = workspace.mixtral_store()
    environment = workspace.jax_environment(
        JAX_COMPILATION_CACHE_DIR=str(workspace.new("jax-cache")),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    workspace.script("plain_jax", "compile", workspace.new("plain"), environment=environment)
    ours: list[Cost] = []
    theirs: list[Cost] = []
    our_processes: list[Cost] = []
    their_processes: list[Cost] = []
    for _ in rounds(ROUNDS, BUDGET_SECONDS):
        loaded = workspace.script("load_graphkiln", store, environment=workspace.jax_environment())
        ours.append(read_seconds(loaded.output))
        our_processes.append(loaded.cost)
        cached = workspace.script("plain_jax", "warm", environment=environment)
        theirs.append(read_seconds(cached.output))
        their_processes.append(cached.cost)
    return Table(
        f"(b) Warm start of the same eight in a fresh process, {len(ours)} rounds",
        ("graphkiln", "JAX's cache"),
        [
            *both("beyond JAX's import and devices", least(ours), least(theirs), GOAL),
            *both("whole process", least(our_processes), least(their_processes)),
        ],
    )
