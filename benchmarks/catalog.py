"""(catalog) A catalogue of 1,000,000 rows: written, compacted, reported, beside pyarrow alone."""

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.measure import Cost, Row, Table, both, least, rounds, run
from benchmarks.workspace import Workspace

ROUNDS = 3
BUDGET_SECONDS = 30.0

Figures = dict[str, float]


def measure(workspace: Workspace) -> Table:
    """Run each step in a fresh process, both sides in turns."""
    folder = workspace.new("catalog")
    folder.mkdir()
    written = _step(workspace, "write", folder)
    parts = _size(folder)
    reports, reads = _in_turns(workspace, ("report", "plain_read"), folder)
    kept = shutil.copytree(folder / "store", workspace.new("catalog"))
    compactions, plain_compactions = [], []
    for _ in rounds(ROUNDS, BUDGET_SECONDS):
        shutil.rmtree(folder / "store")
        shutil.copytree(kept, folder / "store")
        compactions.append(_step(workspace, "compact", folder))
        plain_compactions.append(_step(workspace, "plain_compact", folder))
    compacted = _size(folder)
    compact_reports, compact_reads = _in_turns(workspace, ("report", "plain_read"), folder)
    command = (sys.executable, "-P", "-m", "graphkiln", "report", "--json", "--store", folder / "store")
    whole = least(run(command, workspace.environment()).cost for _ in rounds(ROUNDS, BUDGET_SECONDS))
    return Table(
        "(catalog) A catalogue of 1,000,000 rows, beside pyarrow alone",
        ("graphkiln", "pyarrow"),
        [
            *both("write 1,000 runs of 1,000 rows", _cost([written]), _cost([written], "plain_")),
            *both("compact; pyarrow: read and write", _cost(compactions), _cost(plain_compactions)),
            *both("report on what the runs wrote; pyarrow: read", _cost(reports), _cost(reads)),
            *both("report on what is compacted; pyarrow: read", _cost(compact_reports), _cost(compact_reads)),
            Row("the command `graphkiln report --json` then: wall", whole.wall),
            Row("the command `graphkiln report --json` then: CPU", whole.cpu),
        ],
        [
            (
                f"{parts} as the runs wrote it, {compacted} compacted; pyarrow alone, in one file: "
                f"{(folder / 'plain.parquet').stat().st_size / 1e6:.1f} MB"
            ),
            (
                f"most memory: compact {_peak(compactions)} (pyarrow {_peak(plain_compactions)}), "
                f"report {_peak(reports + compact_reports)} (pyarrow's read {_peak(reads + compact_reads)})"
            ),
        ],
    )


def _in_turns(workspace: Workspace, steps: tuple[str, str], folder: Path) -> tuple[list[Figures], list[Figures]]:
    ours, theirs = zip(
        *([_step(workspace, step, folder) for step in steps] for _ in rounds(ROUNDS, BUDGET_SECONDS)), strict=True
    )
    return list(ours), list(theirs)


def _step(workspace: Workspace, step: str, folder: Path) -> Figures:
    found: Figures = json.loads(
        workspace.script("catalog_steps", step, folder, environment=workspace.environment()).output
    )
    return found


def _cost(found: Iterable[Figures], prefix: str = "") -> Cost:
    return least(Cost(figures[f"{prefix}wall"], figures[f"{prefix}cpu"]) for figures in found)


def _size(folder: Path) -> str:
    files = list((folder / "store" / "catalog").iterdir())
    return f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB in {len(files)} files"


def _peak(found: Iterable[Figures]) -> str:
    return f"{max(figures['megabytes'] for figures in found):.0f} MB"
