"""The benchmarks run. The part that takes seconds also meets its goal; the others are for a machine of their own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_SMALL_BULK = """
import pathlib, sys
from benchmarks import bulk
from benchmarks.workspace import Workspace
bulk.OBJECTS, bulk.ROUNDS = 100, 2
rows = list(bulk._local(Workspace(pathlib.Path(sys.argv[1]))))
print(len(rows), all(row.ours > 0 and row.theirs for row in rows))
"""


def run(*parts: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *parts], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_the_import_costs_no_more_than_the_goal() -> None:
    done = run("c")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<= 1.30 met") == 2


def test_both_sides_of_the_bulk_part_store_and_load_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SMALL_BULK, tmp_path], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert (done.stdout, done.stderr) == ("8 True\n", "")


def test_an_unknown_part_is_refused() -> None:
    done = run("e")
    assert done.returncode == 2
    parts = "a, b, c, d, bulk, catalog, large_store, verified_read, warm_s3"
    assert f"there is no part 'e': choose from {parts}" in done.stderr
