"""How a report on the catalogue is shown as text."""

from collections.abc import Mapping, Sequence
from datetime import UTC

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from graphkiln.flows.report import CatalogReport, Figures, GraphFigures

# A terminal is no place for a year: the JSON document and the page have all days.
SHOWN_DAYS = 14

# What does not fit into the width of a terminal is in the JSON document and the page as well.
_ELSEWHERE = ("blocked", "host", "key")
_SHOWN_DIGITS = 12
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))


def print_catalog_report(console: Console, report: CatalogReport) -> None:
    """Print the figures as tables."""
    console.print(headline(report), markup=False, highlight=False, soft_wrap=True)
    if not report.total.runs:
        return
    _print_figures(console, "network", report.networks)
    _print_figures(console, "day (UTC)", dict(list(report.days.items())[-SHOWN_DAYS:]))
    if len(report.days) > SHOWN_DAYS:
        console.print(f"{len(report.days) - SHOWN_DAYS} earlier days: --json and --html have them", highlight=False)
    _print_graphs(console, "slowest kernel graphs", report.slowest)
    _print_graphs(console, "largest kernel graphs", report.largest)


def headline(report: CatalogReport) -> str:
    """Return the report in one line."""
    scope = f"of {report.network} " if report.network else ""
    since = f"since {report.since.astimezone(UTC):%Y-%m-%d %H:%M} UTC " if report.since else ""
    total = report.total
    if not total.runs:
        return f"the catalogue of {report.store} has no runs {scope}{since}".rstrip()
    return (
        f"{report.store}: {total.runs} runs {scope}{since}".rstrip()
        + f"; hit rate {percent(total.hit_rate)}, {duration(total.seconds_saved)} of compiling saved, "
        f"{duration(total.seconds_compiled)} spent, {decimal(total.new_bytes)} new"
    )


def percent(rate: float | None) -> str:
    """Return a rate as people read it; empty if there is none."""
    return "" if rate is None else f"{100 * rate:.1f} %"


def duration(seconds: float) -> str:
    """Return a length of time as people read it."""
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def figure_cells(figures: Figures) -> dict[str, str]:
    """Return the cells of a row of figures, by column."""
    return {
        "runs": str(figures.runs),
        "hit rate": percent(figures.hit_rate),
        "cached": str(figures.cached),
        "compiled": str(figures.compiled),
        "failed": str(figures.failed),
        "blocked": str(figures.blocked),
        "saved": duration(figures.seconds_saved),
        "spent": duration(figures.seconds_compiled),
        "new": decimal(figures.new_bytes),
    }


def graph_cells(graph: GraphFigures) -> dict[str, str]:
    """Return the cells of a row of a kernel graph, by column."""
    return {
        "network": graph.network,
        "target": graph.target,
        "kernel graph": graph.kernel_graph,
        "compile": duration(graph.seconds),
        "memory": decimal(graph.peak_memory_bytes),
        "artifact": decimal(graph.bytes),
        "stored": decimal(graph.stored_bytes),
        "host": graph.host,
        "key": graph.action_key[:_SHOWN_DIGITS],
    }


def _print_figures(console: Console, what: str, figures: Mapping[str, Figures]) -> None:
    _print_table(console, [{what: name, **figure_cells(item)} for name, item in figures.items()])


def _print_graphs(console: Console, title: str, graphs: Sequence[GraphFigures]) -> None:
    if graphs:
        console.print()
        console.print(title, style="bold", highlight=False)
        _print_table(console, [graph_cells(graph) for graph in graphs])


def _print_table(console: Console, rows: Sequence[Mapping[str, str]]) -> None:
    table = Table(box=None, pad_edge=False)
    columns = [column for column in rows[0] if column not in _ELSEWHERE]
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))
    console.print()
    console.print(table)
