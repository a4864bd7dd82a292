"""What the command line shows while it works, and how it shows what it found."""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from graphkiln.flows.inspection import Explanation, GraphStatus, VariantStatus
from graphkiln.storage.collection import Collection
from graphkiln.storage.keys import PartChange
from graphkiln.storage.records import PlannedGraph
from graphkiln.storage.verify import Severity, Verification
from graphkiln.tasks.outcome import GraphOutcome
from graphkiln.tasks.session import Report

_STYLES = {
    "compiled": "green",
    "cached": "cyan",
    "committed": "green",
    "outdated": "yellow",
    "not committed": "yellow",
    "failed": "bold red",
    "damaged": "bold red",
    "untrusted": "bold red",
    "blocked": "yellow",
    "not compiled": "yellow",
}
_SHOWN_DIGITS = 12
_SHOWN_VALUE = 60


class PipeConsole(Console):
    """A console whose reader may go away, as of ``graphkiln compile … | head``: that ends the output, not the work."""

    def on_broken_pipe(self) -> None:
        """Lead all further output to nowhere."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _WarningHandler(logging.Handler):
    """Prints each record as one line, which a script can search: paths must not be wrapped."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        self._console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def warnings_to(console: Console) -> None:
    """Show the warnings of the store, such as those of damaged objects, on a console."""
    logger = logging.getLogger("graphkiln")
    logger.handlers = [_WarningHandler(console)]
    logger.setLevel(logging.WARNING)
    logger.propagate = False


class ConsoleProgress:
    """Prints a line for each kernel graph that ends; on a terminal, a last line says what is at work.

    Implements `graphkiln.tasks.session.Progress`.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._at_work: list[str] = []
        self._wanted = 0
        self._width = 0
        self._done = 0
        self._status = Status("running the frontend", console=console)

    def __enter__(self) -> "ConsoleProgress":
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def planned(self, graphs: list[PlannedGraph]) -> None:
        """Say how much there is to do."""
        with self._lock:
            self._wanted = len(graphs)
            self._width = max(len(graph.name) for graph in graphs)
        pairs = sum(len(graph.ranks) for graph in graphs)
        self.say(f"the frontend gave {_count(len(graphs), 'kernel graph')} for {_count(pairs, 'rank-program')}")
        self._show_work()

    def compiling(self, graph: PlannedGraph) -> None:
        """Say what is at work."""
        with self._lock:
            self._at_work.append(graph.name)
        if not self._console.is_terminal:
            self.say(f"  {'compiling':9} {graph.name}")
        self._show_work()

    def waiting(self, graph: PlannedGraph, owner: str) -> None:
        """Say for whom this run waits."""
        self.say(f"  {'waiting':9} {graph.name}  for {owner}, which compiles it")

    def finished(self, outcome: GraphOutcome) -> None:
        """Print how a kernel graph ended."""
        with self._lock:
            if outcome.name in self._at_work:
                self._at_work.remove(outcome.name)
            self._done += 1
        style = _STYLES[outcome.state]
        self.say(f"  [{style}]{outcome.state:9}[/] {outcome.name:{self._width}}  {_details(outcome)}")
        self._show_work()

    def _show_work(self) -> None:
        with self._lock:
            names = ", ".join(self._at_work) or "committing"
            self._status.update(f"{self._done} of {self._wanted} done; {names}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _details(outcome: GraphOutcome) -> str:
    ranks = f"ranks {outcome.ranks}"
    if outcome.seconds is not None and outcome.bytes is not None:
        return f"{ranks:12} {outcome.seconds:8.1f} s  {decimal(outcome.bytes)}"
    return f"{ranks:12} {outcome.reason}"


def print_report(console: Console, report: Report, backend: str) -> None:
    """Print the end of a compile: each failure in the compiler's words, and what was committed."""
    for outcome in report.failed:
        console.print(f"\n[bold red]{outcome.name}[/] {outcome.state} in {backend}: {outcome.reason}")
        console.print(outcome.message, markup=False, highlight=False, soft_wrap=True)
        if outcome.state == "failed":
            variant = report.variant[:_SHOWN_DIGITS]
            hint = f"log: graphkiln log {report.network} {outcome.name} --target {report.target} --variant {variant}"
            console.print(hint, markup=False, highlight=False, soft_wrap=True)
    if report.failed:
        console.print()
    title = f"{report.network} for {report.target} (variant {report.variant[:_SHOWN_DIGITS]})"
    console.print(f"{title}: {report.summary()}; {report.seconds:.1f} s", highlight=False, soft_wrap=True)


def print_variants(console: Console, variants: Sequence[VariantStatus]) -> None:
    """Print one row a variant."""
    signed = [item.signed_by or "" for item in variants]
    table = _table("network", "target", "variant", "state", "compiled", "committed", *["signed by"] * any(signed))
    for item, signer in zip(variants, signed, strict=True):
        compiled = sum(graph.state == "compiled" for graph in item.graphs)
        committed = f"{item.committed_at.astimezone():%Y-%m-%d %H:%M:%S}" if item.committed_at else ""
        table.add_row(
            item.network,
            item.target,
            item.variant[:_SHOWN_DIGITS],
            f"[{_STYLES[item.state]}]{item.state}[/]",
            f"{compiled} of {len(item.graphs)}",
            committed,
            *[escape(signer)] * any(signed),
        )
    console.print(table)


def print_graphs(console: Console, variant: VariantStatus) -> None:
    """Print a variant with one row a kernel graph."""
    print_variants(console, [variant])
    if variant.damage:
        console.print(variant.damage, style="red", markup=False, soft_wrap=True)
    parameters = ", ".join(f"{name} = {value!r}" for name, value in variant.parameters.items())
    console.print(f"parameters: {parameters or 'none'}", markup=False, highlight=False, soft_wrap=True)
    table = _table("kernel graph", "ranks", "state", "seconds", "size", "key", "reason")
    for graph in variant.graphs:
        table.add_row(*_graph_row(graph))
    console.print(table)


def _graph_row(graph: GraphStatus) -> tuple[str, ...]:
    return (
        graph.name,
        graph.ranks,
        f"[{_STYLES[graph.state]}]{graph.state}[/]",
        "" if graph.seconds is None else f"{graph.seconds:.1f}",
        "" if graph.bytes is None else decimal(graph.bytes),
        graph.key[:_SHOWN_DIGITS],
        graph.reason or "",
    )


def print_explanation(console: Console, found: Explanation) -> None:
    """Print, for each kernel graph, which parts of its key changed."""
    console.print(f"{found.network} for {found.target}, variant {found.variant[:_SHOWN_DIGITS]}", highlight=False)
    if found.before is None or found.before_at is None:
        console.print("this is its first plan: there is nothing to compare it with", highlight=False)
    else:
        when = f"{found.before_at.astimezone():%Y-%m-%d %H:%M:%S}"
        console.print(f"beside the plan of {when}, variant {found.before[:_SHOWN_DIGITS]}", highlight=False)
    for name, (before, after) in found.parameters.items():
        console.print(f"  parameter {name}: {before!r} -> {after!r}", markup=False, highlight=False)
    for graph in found.graphs:
        if graph.changes is None:
            why = "new"
        elif graph.changes:
            why = "key changed: " + "; ".join(_change(change) for change in graph.changes)
        else:
            why = "same key"
        console.print(f"  {graph.name}: {graph.state}; {why}", markup=False, highlight=False, soft_wrap=True)


def print_verification(console: Console, found: Verification, url: str) -> None:
    """Print every problem and a summary."""
    for problem in found.problems:
        style = "yellow" if problem.severity == "leftover" else "red"
        console.print(f"[{style}]{problem.severity}[/] ", end="")
        console.print(
            problem.message, problem.path if problem.severity == "leftover" else "", markup=False, soft_wrap=True
        )
    severities: dict[Severity, str] = {"damage": "damaged", "untrusted": "not trusted"}
    counts = [f"{found.count(severity)} {told}" for severity, told in severities.items() if found.count(severity)]
    verdict = f"{', '.join(counts)}: run the compile again to make them again" if counts else "nothing is damaged"
    console.print(f"{url}: {found.objects} objects, {found.committed} committed variants; {verdict}", soft_wrap=True)


def print_collection(console: Console, found: Collection, url: str) -> None:
    """Print what a collection freed, network by network."""
    would = "would be " if found.dry_run else ""
    for network, target, variant in found.dropped:
        line = f"{would}dropped: {network} for {target} (variant {variant[:_SHOWN_DIGITS]})"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.freed:
        table = _table("network", "objects", "size")
        for item in found.freed:
            table.add_row(item.network or "(of no network)", str(item.objects), decimal(item.bytes))
        console.print(table)
    freed = f"{_count(sum(item.objects for item in found.freed), 'object')}, {decimal(found.freed_bytes)}"
    kept = f"{_count(found.kept_objects, 'object')}, {decimal(found.kept_bytes)}"
    console.print(f"{url}: {would}freed: {freed}; kept: {kept}", markup=False, highlight=False, soft_wrap=True)


def _change(change: PartChange) -> str:
    before = "absent" if change.before is None else _short(change.before.value)
    after = "absent" if change.after is None else _short(change.after.value)
    return f"{change.name} {before} -> {after}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_VALUE else f"{text[:_SHOWN_VALUE]}…"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
