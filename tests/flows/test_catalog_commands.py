"""`report` and `catalog compact`, run as users run them."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from graphkiln.storage.catalog import part_paths, write_part
from graphkiln.storage.store import open_for_writing, open_store
from tests.storage.catalogs import history, row, run_of

RUNS = 20


def run(store: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
    return subprocess.run(
        [sys.executable, "-m", "graphkiln", *map(str, arguments), "--store", str(store)],
        capture_output=True,
        text=True,
        env={**clean, "PREFECT_HOME": str(store), "COLUMNS": "100"},
        timeout=120,
    )


def run_json(store: Path, *arguments: str) -> dict[str, Any]:
    done = run(store, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with runs of four networks, one a day."""
    store = open_for_writing(str(tmp_path / "store"))
    for day, rows in enumerate(history(RUNS, 3)):
        write_part(store, [msgspec.structs.replace(row, time=row.time + timedelta(days=day)) for row in rows])
    return tmp_path / "store"


def test_a_report_as_tables(store: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(store, "report", "--html", page)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{store}: ")
    assert "hit rate" in lines[0]
    assert [line.split()[0] for line in lines if line.startswith("net-")][:4] == ["net-0", "net-1", "net-2", "net-3"]
    assert sum(line.startswith("2026-") for line in lines) == 14
    assert "earlier days: --json and --html have them" in done.stdout
    assert "slowest kernel graphs" in lines
    assert "largest kernel graphs" in lines
    assert lines[-1] == f"wrote {page}"
    assert "</html>" in page.read_text()


def test_a_report_as_json_and_a_compaction_that_changes_none_of_it(store: Path) -> None:
    before = run_json(store, "report")
    assert before["store"] == str(store)
    assert before["total"]["runs"] == sum(figures["runs"] for figures in before["days"].values()) == RUNS
    done = run(store, "catalog", "compact")
    assert done.stdout == f"{store}: {RUNS} parts are now 1, with {3 * RUNS} rows\n"
    assert len(part_paths(open_store(str(store)))) == 1
    assert run_json(store, "report") == before
    compacted = run_json(store, "catalog", "compact")
    assert compacted == {
        "store": str(store),
        "before": 1,
        "after": 1,
        "rows": 3 * RUNS,
        "repeated_rows": 0,
        "damaged": [],
    }


def test_a_network_and_an_age(store: Path) -> None:
    found = run_json(store, "report", "net-3", "--since", "9000d")
    assert list(found["networks"]) == ["net-3"]
    assert found["since"].endswith("Z")
    done = run(store, "report", "net-3", "--since", "1s")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"the catalogue of {store} has no runs of net-3 since 2")


def test_what_users_get_wrong(store: Path) -> None:
    done = run(store, "report", "net-9")
    assert done.returncode == 2
    assert "no runs of net-9; it has: net-0, net-1, net-2, net-3" in done.stderr
    done = run(store, "report", "--since", "3 fortnights", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["reason"] == "bad-duration"
    assert "'3 fortnights' is no duration of at most a century: write 30d" in done.stderr


def test_an_empty_store_has_nothing_to_tell_and_stays_empty(tmp_path: Path) -> None:
    store = tmp_path / "nowhere"
    done = run(store, "report")
    assert (done.returncode, done.stdout) == (0, f"the catalogue of {store} has no runs\n")
    done = run(store, "catalog", "compact")
    assert (done.returncode, done.stdout) == (0, f"{store}: 0 parts are now 0, with 0 rows\n")
    assert not store.exists()


def test_a_damaged_part_is_a_warning(tmp_path: Path) -> None:
    store = open_for_writing(str(tmp_path))
    path = write_part(store, run_of(1))
    write_part(store, [row()])
    (tmp_path / path).write_bytes(b"damaged")
    done = run(tmp_path, "report")
    assert done.returncode == 0
    assert f"warning: {tmp_path}/{path}" in done.stderr
    assert "1 runs" in done.stdout
    done = run(tmp_path, "verify")
    assert done.returncode == 0
    assert path in done.stdout
    assert "nothing is damaged" in done.stdout
