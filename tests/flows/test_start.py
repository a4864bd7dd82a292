"""What starts when: kernel graphs, and the embedded Prefect server."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from graphkiln.tasks.session import open_session
from graphkiln.tasks.workers import Workers

EXIT_BAD_INPUT = 2


def compile_here(spec: Path, store: str, prefect_home: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command line with nothing configured for Prefect."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
    done = subprocess.run(
        [sys.executable, "-m", "graphkiln", "compile", str(spec), "--store", store, "--json", *options],
        capture_output=True,
        text=True,
        cwd=spec.parent,
        env={**clean, "PREFECT_HOME": str(prefect_home)},
        timeout=120,
    )
    return done.returncode, json.loads(done.stdout)


def running_with(prefect_home: Path) -> list[int]:
    """Return the processes that have this folder as Prefect's home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PREFECT_HOME") == str(prefect_home):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_the_largest_kernel_graph_starts_first(cc_network: Path, store_url: str) -> None:
    for kernel, lines in (("negate", 1), ("scale", 3), ("shift", 2)):
        source = "".join(f"int {kernel}{line}(int a) {{ return a; }}\n" for line in range(lines))
        (cc_network.parent / "kernels" / f"{kernel}.c").write_text(source)
    with Workers(1) as workers:
        session = open_session(cc_network, workers, store=store_url)
        assert [graph.name for graph in session.plan.graphs] == ["negate", "scale", "shift"]
        assert [graphs[0].name for graphs in session.wanted.values()] == ["scale", "shift", "negate"]


def test_a_lost_ref_of_a_cached_plan_is_written_again_without_prefect(
    cc_network: Path, store_url: str, tmp_path: Path
) -> None:
    prefect_home = tmp_path / "prefect"
    assert compile_here(cc_network, store_url, prefect_home, "--no-prefect")[0] == 0
    shutil.rmtree(Path(store_url) / "refs")
    code, report = compile_here(cc_network, store_url, prefect_home)
    assert code == 0
    assert report["committed"]
    assert {graph["state"] for graph in report["graphs"]} == {"cached"}
    assert running_with(prefect_home) == []


@pytest.mark.parametrize("committed", [False, True])
def test_a_refused_network_leaves_no_server(
    cc_network: Path, store_url: str, tmp_path: Path, *, committed: bool
) -> None:
    prefect_home = tmp_path / "prefect"
    if committed:
        assert compile_here(cc_network, store_url, prefect_home, "--no-prefect")[0] == 0
    for source in (cc_network.parent / "kernels").iterdir():
        source.unlink()
    code, report = compile_here(cc_network, store_url, prefect_home)
    assert code == EXIT_BAD_INPUT
    assert "error" in report
    assert running_with(prefect_home) == []
