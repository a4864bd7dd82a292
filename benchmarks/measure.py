"""Running commands and taking their time, and how the results are shown."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 400.0


class Cost(NamedTuple):
    """What something took, in seconds: wall time, and CPU time of its whole process tree."""

    wall: float
    cpu: float

    def plus(self, other: "Cost") -> "Cost":
        """Return what both took."""
        return Cost(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(self.wall - other.wall, self.cpu - other.cpu)


@dataclass(frozen=True)
class Done:
    """A command that succeeded: what it took, and its standard output."""

    cost: Cost
    output: str


def run(command: Sequence[str | Path], environment: Mapping[str, str]) -> Done:
    """Run a command to its end, from the root of the checkout.

    Raises:
        RuntimeError: it failed; the message holds what it printed.
        subprocess.TimeoutExpired: it took longer than `TIMEOUT_SECONDS`.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in command],
        env=dict(environment),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{output}\n{errors}")
    return Done(Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), output)


def rounds(wanted: int, budget_seconds: float) -> Iterator[int]:
    """Yield the number of each round: one at least, and another if one like the longest so far fits the budget."""
    begun = time.monotonic()
    longest = 0.0
    for number in range(wanted):
        started = time.monotonic()
        if number and started + longest > begun + budget_seconds:
            return
        yield number
        longest = max(longest, time.monotonic() - started)


def least(costs: Iterable[Cost]) -> Cost:
    """Return the least wall and the least CPU time of several runs: whatever else the machine does only adds."""
    walls, cpus = zip(*costs, strict=True)
    return Cost(min(walls), min(cpus))


@dataclass(frozen=True)
class Row:
    """One line of the result: seconds of GraphKiln, seconds of what it is compared with, and the goal for the ratio.

    A line without the other side only informs.
    """

    what: str
    ours: float
    theirs: float | None = None
    goal: float | None = None


@dataclass(frozen=True)
class Table:
    """The result of one part.

    Attributes:
        title: what is compared.
        sides: what the two columns of seconds are.
        rows: the lines.
        notes: what to know beside them.
    """

    title: str
    sides: tuple[str, str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Return the table as lines of text."""
        width = max(len(row.what) for row in self.rows)
        ours, theirs = self.sides
        lines = [self.title, f"  {'seconds':{width}}  {ours:>12}  {theirs:>14}  {'ratio':>6}  goal"]
        lines += [_line(row, width) for row in self.rows]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class Count:
    """One line of a table of counts: what was counted, the figure of each column, and the goal for all of them."""

    what: str
    figures: Sequence[float]
    goal: int | None = None


@dataclass(frozen=True)
class CountTable:
    """The result of a part that counts.

    Attributes:
        title: what is counted.
        columns: what the figures are.
        rows: the lines.
        notes: what to know beside them.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Count]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Return the table as lines of text."""
        width = max(len(row.what) for row in self.rows)
        lines = [self.title, f"  {'':{width}}" + "".join(f"  {column:>16}" for column in self.columns) + "  goal"]
        for row in self.rows:
            line = f"  {row.what:{width}}" + "".join(f"  {figure:16.4g}" for figure in row.figures)
            if row.goal is not None:
                line += f"  <= {row.goal} {'met' if max(row.figures) <= row.goal else 'MISSED'}"
            lines.append(line)
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def both(what: str, ours: Cost, theirs: Cost, goal: float | None = None) -> list[Row]:
    """Return a line for the wall time and one for the CPU time; the goal is that of both."""
    return [
        Row(f"{what}: wall", ours.wall, theirs.wall, goal),
        Row(f"{what}: CPU", ours.cpu, theirs.cpu, goal),
    ]


def _line(row: Row, width: int) -> str:
    text = f"  {row.what:{width}}  {row.ours:12.2f}"
    if row.theirs is None:
        return text
    ratio = row.ours / row.theirs
    text += f"  {row.theirs:14.2f}  {ratio:6.2f}"
    if row.goal is None:
        return text
    return f"{text}  <= {row.goal:.2f} {'met' if ratio <= row.goal else 'MISSED'}"
