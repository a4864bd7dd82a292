"""Mixtral-8x7B for 64 devices, compiled for real through the command line: on XLA:CPU and by the TPU compiler."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import graphkiln
from graphkiln import NotCommittedError

pytestmark = [pytest.mark.jax, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixtral"
SPEC = "mixtral-8x7b.toml"
RANKS = {
    "first_fwd": "0-15",
    "first_bwd": "0-15",
    "first_opt": "0-15",
    "mid_fwd": "16-47",
    "mid_bwd": "16-47",
    "mid_opt": "16-47",
    "last_step": "48-63",
    "last_opt": "48-63",
}
BACKWARD = {"first_bwd", "mid_bwd", "last_step"}


def compile_mixtral(example: Path, store: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "graphkiln",
            "compile",
            str(example / SPEC),
            "--store",
            str(store),
            "--json",
            *arguments,
        ],
        capture_output=True,
        text=True,
        env={**clean, "PREFECT_HOME": str(store.parent)},
        timeout=500,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def states(report: dict[str, Any]) -> dict[str, str]:
    return {graph["name"]: graph["state"] for graph in report["graphs"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixtral") / "store"


@pytest.mark.xdist_group("mixtral-cpu")
def test_cpu_target_compiles_once_and_again_only_what_a_change_reaches(store: Path, tmp_path: Path) -> None:
    # The first run is README's first command: through Prefect's embedded server.
    code, first = compile_mixtral(EXAMPLE, store)
    assert code == 0
    assert {graph["name"]: graph["ranks"] for graph in first["graphs"]} == RANKS
    assert set(states(first).values()) == {"compiled"}
    assert first["committed"] is True

    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(EXAMPLE, elsewhere)
    for source in elsewhere.glob("*.py"):
        source.write_text(f"# A comment that moves every line.\n\n{source.read_text()}")
    code, moved = compile_mixtral(elsewhere, store)
    assert code == 0
    assert set(states(moved).values()) == {"cached"}
    assert moved["manifest"] == first["manifest"]

    code, changed = compile_mixtral(EXAMPLE, store, "--set", "z_loss=0.002", "--no-prefect")
    assert code == 0
    assert {name for name, state in states(changed).items() if state == "compiled"} == {"last_step"}
    assert changed["variant"] != first["variant"]


@pytest.mark.tpu
@pytest.mark.xdist_group("mixtral-tpu")
def test_the_report_replayed(store: Path) -> None:
    """The real TPU compiler runs out of HBM: nothing is committed, nothing is served, what compiled is kept."""
    batch_16 = ("--target", "tpu-v5e-o0", "--set", "batch_size=16", "--no-prefect")
    code, failed = compile_mixtral(EXAMPLE, store, *batch_16)
    assert code == 3
    assert failed["committed"] is False
    assert {name for name, state in states(failed).items() if state == "failed"} == BACKWARD
    assert {name for name, state in states(failed).items() if state == "compiled"} == RANKS.keys() - BACKWARD
    for graph in failed["graphs"]:
        if graph["name"] in BACKWARD:
            assert graph["reason"] == "compiler-error"
            assert "RESOURCE_EXHAUSTED" in graph["message"]
            assert "Ran out of memory on HBM" in graph["message"]
            assert "exceeds available HBM (15.75G)" in graph["message"]
    assert not list((store / "refs" / "mixtral-8x7b").rglob(failed["variant"]))

    code, again = compile_mixtral(EXAMPLE, store, *batch_16)
    assert code == 3
    assert {name for name, state in states(again).items() if state == "failed"} == BACKWARD
    assert {name for name, state in states(again).items() if state == "cached"} == RANKS.keys() - BACKWARD

    code, fixed = compile_mixtral(EXAMPLE, store, "--target", "tpu-v5e-o0", "--no-prefect")
    assert code == 0
    assert fixed["committed"] is True
    # The optimizers do not see the batch: they are the ones of the failed run.
    assert {name for name, state in states(fixed).items() if state == "cached"} == {"first_opt", "mid_opt", "last_opt"}

    loaded = graphkiln.load("mixtral-8x7b", target="tpu-v5e-o0", store=str(store))
    assert loaded.graphs(rank=13) == ["first_fwd", "first_bwd", "first_opt"]
    with pytest.raises(NotCommittedError, match="batch_size = 1, not 16"):
        graphkiln.load("mixtral-8x7b", target="tpu-v5e-o0", parameters={"batch_size": 16}, store=str(store))
