"""Runs of the command line that are killed in a stage of one's choice, and what they leave behind."""

import functools
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from graphkiln.storage import layout
from graphkiln.storage.digests import Digest
from graphkiln.storage.records import Plan, PlannedGraph
from graphkiln.storage.store import Store

PARSE, COMPILE, COMMIT = "parse", "compile", "commit"
STAGES = (PARSE, COMPILE, COMMIT)
AFTER = "after the commit"

_RUN_SECONDS = 120.0
_END_SECONDS = 3.0
_ASK_SECONDS = 0.05
_POLL_SECONDS = 0.01


class Run:
    """A run of the command line whose output is read as it comes.

    Attributes:
        text: what it has printed so far.
    """

    def __init__(self, arguments: Sequence[str], scratch: Path, environment: Mapping[str, str]) -> None:
        """Start it.

        Args:
            arguments: of the command line.
            scratch: the folder for temporary files.
            environment: variables besides those of this process, of which Prefect's and our own are left out.
        """
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
        self.text = ""
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graphkiln", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**clean, "TMPDIR": str(scratch), **environment},
            bufsize=0,
        )

    def read_until(self, done: Callable[[str], bool], seconds: float = _RUN_SECONDS) -> bool:
        """Read until `done` says so of the text, and ask it often; False if the run or the time ends before."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while not done(self.text):
            left = deadline - time.monotonic()
            if left <= 0 or self._ended:
                return False
            if select.select([output], [], [], min(left, _ASK_SECONDS))[0]:
                chunk = os.read(output, 65536)
                self._ended = not chunk
                self.text += chunk.decode()
        return True

    def kill(self) -> bool:
        """Kill the run and nothing else; False if it had ended by itself."""
        self._process.kill()
        self.finish()
        return self._process.returncode < 0

    def finish(self) -> int:
        """Wait for the end, and return the exit code."""
        self.read_until(lambda _: False)
        return self._process.wait(_RUN_SECONDS)


def stage_reached(stage: str, graphs: int, text: str) -> bool:
    """Tell from its output whether a run has come to a stage."""
    lines = text.splitlines()
    if stage == PARSE:
        return any(", store " in line for line in lines)
    if stage == COMPILE:
        return any(line.startswith("the frontend gave ") for line in lines)
    return sum(line.startswith(("  compiled ", "  cached ")) for line in lines) == graphs


def stage_durations(run: Run, graphs: int) -> dict[str, float]:
    """Follow a run that nobody disturbs, and return how long each stage took, in seconds."""
    begun = []
    for stage in STAGES:
        assert run.read_until(functools.partial(stage_reached, stage, graphs)), run.text
        begun.append(time.monotonic())
    assert run.read_until(lambda text: "committed manifest" in text), run.text
    begun.append(time.monotonic())
    assert run.finish() == 0, run.text
    return {stage: begun[place + 1] - begun[place] for place, stage in enumerate(STAGES)}


class Killer:
    """Kills runs at random moments of a stage, and learns how long the stages last.

    Args:
        durations: how long each stage took in a run that nobody disturbed, in seconds.
        graphs: the number of kernel graphs of the network.
        seed: of the random moments.
    """

    def __init__(self, durations: Mapping[str, float], graphs: int, seed: int) -> None:
        self._durations = dict(durations)
        self._graphs = graphs
        self._random = random.Random(seed)  # noqa: S311  the moments are no secret
        self._moment = 0.0

    def kill(self, run: Run, stage: str) -> bool:
        """Kill a run at a random moment of a stage; False if it had ended before."""
        run.read_until(functools.partial(stage_reached, stage, self._graphs))
        self._moment = self._random.uniform(0, self._durations[stage])
        run.read_until(lambda _: False, self._moment)
        return run.kill()

    def learn(self, aimed_at: str, hit: str) -> None:
        """Aim earlier than the last kill if it came too late, and a little later after any other."""
        order = [*STAGES, AFTER]
        if order.index(hit) > order.index(aimed_at):
            self._durations[aimed_at] = min(self._moment, self._durations[aimed_at] * 0.5)
        else:
            self._durations[aimed_at] *= 1.2


def plan_in(store: Store) -> Plan | None:
    """Return the one plan of a store."""
    names = store.variants(layout.PLANS)
    document = store.read_plan(*names[0]) if names else None
    return document.plan if document else None


def committed_in(store: Store) -> Digest | None:
    """Return what the one ref of a store names."""
    names = store.variants(layout.REFS)
    ref = store.read_ref(*names[0]) if names else None
    return ref.manifest if ref else None


def not_compiled(store: Store, plan: Plan) -> list[PlannedGraph]:
    """Return the kernel graphs of a plan that have no result."""
    return [graph for graph in plan.graphs if store.read_action(graph.key) is None]


def stage_of(store: Store, plan_before: Plan | None, committed_before: Digest | None) -> str:
    """Return the stage in which a run was killed, from what the store has that it had not before."""
    plan = plan_in(store)
    if plan is None or plan == plan_before:
        return PARSE
    if not_compiled(store, plan):
        return COMPILE
    return COMMIT if committed_in(store) == committed_before else AFTER


def survivors(folder: Path) -> list[psutil.Process]:
    """Return the processes that work in a folder for temporary files and do not end within the time allowed."""
    deadline = time.monotonic() + _END_SECONDS
    found = [process for process in psutil.process_iter() if _works_in(process, folder)]
    # Until they are zombies: when the system's first process takes those away is no business of ours.
    while found and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        found = [process for process in psutil.process_iter() if _works_in(process, folder)]
    return found


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get("TMPDIR", "").startswith(str(folder))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
