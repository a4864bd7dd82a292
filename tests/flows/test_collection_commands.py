"""gc, rm, pin and unpin, as a user calls them, and the flow `collect`."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import graphkiln
from graphkiln.storage import layout
from graphkiln.storage.errors import DamagedStoreError, NotCommittedError
from graphkiln.storage.store import open_store
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, call

KERNELS = {"double": "int run(int a) { return 2 * a; }", "triple": "int run(int a) { return 3 * a; }"}

pytestmark = pytest.mark.usefixtures("without_prefect")


@pytest.fixture
def network(tmp_path: Path) -> CcNetwork:
    return CcNetwork(tmp_path / "network", KERNELS)


def graphkiln_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphkiln", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def as_json(*arguments: str) -> dict[str, Any]:
    done = graphkiln_command(*arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_network_from_compile_to_removal(network: CcNetwork, store_url: str, tmp_path: Path) -> None:
    compiled = graphkiln.ensure(network.spec, store=store_url)
    other = CcNetwork(tmp_path / "other", {"double": KERNELS["double"]}, name="other")
    graphkiln.ensure(other.spec, store=store_url)
    at_once = ("--store", store_url, "--grace", "0s")

    # The runs have ended a moment ago, and their trainers may still be loading.
    assert as_json("gc", *at_once, "--max-size", "0")["freed"] == []
    _expire_run_pins(store_url)
    assert as_json("gc", *at_once)["dropped"] == []

    pinned = as_json("pin", str(network.spec), "--store", store_url, "--for", "2d", "--reason", "the big run")
    assert [item["network"] for item in pinned["pinned"]] == [NAME]
    refused = graphkiln_command("rm", NAME, "--store", store_url)
    assert refused.returncode == 2
    assert f"{NAME} for {TARGET} (variant {compiled.variant[:12]}) is pinned (the big run): unpin it first" in (
        refused.stderr.replace("\n", " ")
    )
    would = as_json("gc", *at_once, "--max-size", "0", "--dry-run")
    assert [name for name, _, _ in would["dropped"]] == ["other"]
    assert graphkiln.load("other", target=TARGET, store=store_url)
    done = graphkiln_command("gc", *at_once, "--max-size", "0")
    assert done.returncode == 0
    assert "dropped: other for native" in done.stdout
    with pytest.raises(NotCommittedError):
        graphkiln.load("other", target=TARGET, store=store_url)
    assert call(graphkiln.load(NAME, target=TARGET, store=store_url), "double", tmp_path / "a", 4) == 8

    assert "unpinned kernels for native" in graphkiln_command("unpin", NAME, "--store", store_url).stdout
    held = graphkiln.load(NAME, target=TARGET, store=store_url)
    assert "removed kernels for native" in graphkiln_command("rm", NAME, "--store", store_url).stdout
    as_json("gc", *at_once)
    assert call(held, "double", tmp_path / "b", 4) == 8  # for a day more
    for path in (Path(store_url) / layout.MANIFEST_PINS).iterdir():
        path.unlink()
    freed = as_json("gc", *at_once)["freed"]
    assert [item["network"] for item in freed] == [NAME]
    with pytest.raises(DamagedStoreError):
        held.load("triple")
    network.take_runs()
    again = graphkiln.ensure(network.spec, store=store_url)
    assert call(again, "triple", tmp_path / "c", 4) == 12
    assert network.take_runs() == sorted(KERNELS)


def test_a_trainer_that_loads_late_pins(network: CcNetwork, store_url: str, tmp_path: Path) -> None:
    loaded = graphkiln.ensure(network.spec, store=store_url)
    loaded.pin(timedelta(hours=12))
    _expire_run_pins(store_url)
    assert as_json("gc", "--store", store_url, "--grace", "0s", "--max-size", "0")["dropped"] != []
    assert call(loaded, "double", tmp_path / "a", 4) == 8


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gc", "--older-than", "soon"], "'soon' is no duration of at most a century: write 30d, 12h, 90m, 2w or 45s"),
        (["gc", "--max-size", "big"], "'big' is no size: write 200GB, 1.5TiB or a number of bytes"),
        (["gc", "--keep-last", "0"], "0 is not in the range x>=1"),
        (["rm", "nothing"], "has no nothing; it has: kernels for native"),
        (["rm", NAME, "--variant", "zz"], f"no variant of {NAME} starts with 'zz'"),
        (["pin", NAME, "--for", "ever"], "'ever' is no duration"),
        (["unpin", NAME], f"has no pin of {NAME}; it has: nothing"),
    ],
)
def test_bad_input_is_one_clear_line_and_changes_nothing(
    network: CcNetwork, store_url: str, arguments: list[str], told: str
) -> None:
    graphkiln.ensure(network.spec, store=store_url)
    before = sorted(open_store(store_url).names(""))
    done = graphkiln_command(*arguments, "--store", store_url)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert sorted(open_store(store_url).names("")) == before


@pytest.mark.parametrize("command", [["gc"], ["gc", "--dry-run"], ["rm", NAME], ["pin", NAME], ["unpin", NAME]])
def test_no_store_is_made_only_to_be_collected(tmp_path: Path, command: list[str]) -> None:
    done = graphkiln_command(*command, "--store", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert f"there is no store at {tmp_path / 'nowhere'}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def _expire_run_pins(store: str) -> None:
    for path in (Path(store) / layout.RUN_PINS).iterdir():
        path.unlink()
