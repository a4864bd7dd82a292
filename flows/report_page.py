"""A report on the catalogue as one HTML page that holds all it needs: no script, nothing from a network.

The plots are drawn by matplotlib, which comes with the extra `report`. They take the page's colour for their lines and
letters, so that they can be read on light and dark.
"""

import contextlib
import io
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkiln.flows.report import CatalogReport
from graphkiln.flows.report_text import figure_cells, graph_cells, headline
from graphkiln.storage.errors import BadInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOTTED_NETWORKS = 15

# Stands for the page's own colour until the drawing is done.
_INK = "#010203"
_COLOURS = {"cached": "#2f9e77", "compiled": "#4b83d6", "failed": "#d9534f", "blocked": "#999999"}
_SAVED, _SPENT = _COLOURS["cached"], _COLOURS["compiled"]
_HOUR, _GIGABYTE, _DAY = 3600.0, 1e9, timedelta(days=1)
_STYLE: dict[str, Any] = {
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.framealpha": 0.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "text.parse_math": False,
    # Letters stay letters, and equal plots have equal bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "graphkiln",
}

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; white-space: nowrap; }}
th {{ border-bottom: 1px solid; }}
svg {{ width: 100%; height: auto; }}
svg text {{ font-family: system-ui, sans-serif !important; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{headline}</p>
{body}
</body>
</html>
"""


def write_page(report: CatalogReport, path: Path) -> None:
    """Write a report as an HTML page, whole or not at all.

    Raises:
        BadInputError: matplotlib is not installed, or the file cannot be written.
    """
    page = page_of(report).encode()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(page)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise BadInputError(f"the page {path} cannot be written: {error.strerror}", reason="bad-output") from error


def page_of(report: CatalogReport) -> str:
    """Return a report as an HTML page.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    title = f"GraphKiln: {report.network or 'all networks'}"
    sections = []
    if report.damaged:
        sections.append(f"<p>Left out, as they are damaged: {escape(', '.join(report.damaged))}</p>")
    if report.total.runs:
        networks = [{"network": name, **figure_cells(figures)} for name, figures in report.networks.items()]
        days = [{"day": name, **figure_cells(figures)} for name, figures in report.days.items()]
        sections += [
            _plots(report),
            _section("By network", networks),
            _section("Slowest kernel graphs", [graph_cells(graph) for graph in report.slowest]),
            _section("Largest kernel graphs", [graph_cells(graph) for graph in report.largest]),
            _section("By day (UTC)", days),
        ]
    return _PAGE.format(title=escape(title), headline=escape(headline(report)), body="\n".join(sections))


def _section(title: str, rows: Sequence[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.values())}</tr>\n" for row in rows)
    return f"<h2>{escape(title)}</h2>\n<div><table>\n<tr>{head}</tr>\n{body}</table></div>"


def _plots(report: CatalogReport) -> str:
    """Return all plots as one drawing, so that nothing in it is named twice."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadInputError(
            "matplotlib, which draws the page's plots, is not installed: run  pip install 'graphkiln[report]'",
            reason="extra-not-installed",
        ) from error
    plots: list[Callable[[Axes, CatalogReport], None]] = [_plot_outcomes, _plot_hours, _plot_growth, _plot_networks]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 3 * len(plots)), layout="constrained")
        for axes, plot in zip(figure.subplots(len(plots)), plots, strict=True):
            plot(axes, report)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :].replace(_INK, "currentColor")
    label = "Kernel graphs, hours and new bytes by day, and hours by network; the tables below have the numbers"
    return drawing.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _plot_outcomes(axes: "Axes", report: CatalogReport) -> None:
    days = _days_of(axes, report)
    below = [0] * len(days)
    for outcome, colour in _COLOURS.items():
        counts = [getattr(figures, outcome) for figures in report.days.values()]
        axes.bar(days, counts, bottom=below, color=colour, label=outcome)
        below = [low + count for low, count in zip(below, counts, strict=True)]
    _finish(axes, "kernel graphs by day")


def _plot_hours(axes: "Axes", report: CatalogReport) -> None:
    saved = [figures.seconds_saved / _HOUR for figures in report.days.values()]
    spent = [figures.seconds_compiled / _HOUR for figures in report.days.values()]
    days = _days_of(axes, report)
    axes.bar(days, saved, color=_SAVED, label="saved")
    axes.bar(days, spent, bottom=saved, color=_SPENT, label="spent")
    _finish(axes, "hours of compiling by day")


def _plot_growth(axes: "Axes", report: CatalogReport) -> None:
    grown = list(itertools.accumulate(figures.new_bytes / _GIGABYTE for figures in report.days.values()))
    axes.plot(_days_of(axes, report), grown, color=_SPENT, marker="o", markersize=3, label="new artifacts, summed")
    axes.set_ylim(bottom=0)
    _finish(axes, "growth in GB of the store")


def _plot_networks(axes: "Axes", report: CatalogReport) -> None:
    busiest = sorted(
        report.networks.items(), key=lambda item: item[1].seconds_saved + item[1].seconds_compiled, reverse=True
    )[:PLOTTED_NETWORKS]
    names = [name for name, _ in reversed(busiest)]
    saved = [figures.seconds_saved / _HOUR for _, figures in reversed(busiest)]
    spent = [figures.seconds_compiled / _HOUR for _, figures in reversed(busiest)]
    axes.barh(names, saved, color=_SAVED, label="saved")
    axes.barh(names, spent, left=saved, color=_SPENT, label="spent")
    _finish(axes, "hours of compiling by network")


def _days_of(axes: "Axes", report: CatalogReport) -> list[date]:
    """Return the days, and let the axis have all of them and a week at least."""
    from matplotlib.dates import date2num

    days = [date.fromisoformat(day) for day in report.days]
    axes.xaxis_date()
    axes.set_xlim(date2num(days[0] - _DAY), date2num(max(days[-1] + _DAY, days[0] + 7 * _DAY)))
    return days


def _finish(axes: "Axes", title: str) -> None:
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
