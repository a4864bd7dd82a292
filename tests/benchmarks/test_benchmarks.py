"""The benchmarks run. The part that takes seconds also meets its goal; the others are for a machine of their own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*parts: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *parts], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_the_import_costs_no_more_than_the_goal() -> None:
    done = run("c")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<= 1.30 met") == 2


def test_an_unknown_part_is_refused() -> None:
    done = run("e")
    assert done.returncode == 2
    assert "there is no part 'e': choose from a, b, c, d, verified_read, warm_s3" in done.stderr
