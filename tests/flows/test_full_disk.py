"""A real file system that is full at any point of a run: a clear error, nothing half, and the next run goes on."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphkiln.storage.errors import StoreUnavailableError
from graphkiln.storage.local import TEMPORARY_PREFIX
from graphkiln.storage.store import open_for_writing, open_store
from graphkiln.storage.verify import verify_store
from tests.flows.cc_networks import CcNetwork
from tests.flows.crash_points import FORMER, KERNELS, load, not_usable
from tests.flows.stand_in_workers import Kernels, outputs_of, run
from tests.storage.mounts import Mount, small_disk


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A file system of 600 KB that can hold 200 files."""
    with small_disk(tmp_path / "mounted", "size=600k,nr_inodes=200") as mounted:
        yield mounted


@pytest.mark.parametrize("before", [None, FORMER], ids=["a first run", "a run after a change"])
@pytest.mark.parametrize("what", ["blocks", "inodes"])
def test_a_disk_with_any_number_of_blocks_or_inodes_left(
    mount: Mount, what: str, before: Kernels | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """With stand-ins for the compilers."""
    url = str(mount.path / "store")
    needed = _needed(mount, url, before)[what]
    ended: Counter[str] = Counter()
    for left in range(needed + 2):
        shutil.rmtree(url, ignore_errors=True)
        if before is not None:
            run(lambda: open_for_writing(url), before)
        mount.fill(blocks=left if what == "blocks" else None, inodes=left if what == "inodes" else None)
        try:
            report, _ = run(lambda: open_for_writing(url), KERNELS)
        except StoreUnavailableError as error:
            assert (error.reason, error.exit_code, error.retryable) == ("disk-full", 6, True)
            assert "no space left" in str(error)
            ended["full"] += 1
            expected = None if before is None else outputs_of(before)
        else:
            assert report.manifest is not None
            ended["finished"] += 1
            expected = outputs_of(KERNELS)
        store = open_store(url)
        assert not verify_store(store).damaged, f"{left} {what} were left"
        assert not [path for path in store.names("") if TEMPORARY_PREFIX in path], f"{left} {what} were left"
        assert load(store) == expected
        missing = not_usable(store)
        mount.empty()
        report, workers = run(lambda: open_for_writing(url), KERNELS)
        assert report.manifest is not None
        assert sorted(workers.compiled) == sorted(missing)
        assert workers.waited == 0
        assert load(store) == outputs_of(KERNELS)
        assert not verify_store(store).problems
    assert ended["full"] >= needed // 2
    assert ended["finished"]
    with capsys.disabled():
        print(f"\n{'a first run' if before is None else 'a run after a change'}: {ended.total()} numbers of {what}")


def _needed(mount: Mount, url: str, before: Kernels | None) -> dict[str, int]:
    """Return what a run takes of an empty disk."""
    if before is not None:
        run(lambda: open_for_writing(url), before)
    start = mount.used()
    run(lambda: open_for_writing(url), KERNELS)
    return {what: count - start[what] for what, count in mount.used().items()}


def test_the_command_line_says_that_the_disk_is_full(mount: Mount, tmp_path: Path) -> None:
    network = CcNetwork(tmp_path / "network", {"negate": "int run(int a) { return -a; }"})
    store = mount.path / "store"
    command = [sys.executable, "-m", "graphkiln", "compile", str(network.spec), "--no-prefect", "--json"]
    mount.fill(blocks=4)
    full = subprocess.run([*command, "--store", str(store)], capture_output=True, text=True, check=False)
    assert full.returncode == 6
    error = json.loads(full.stdout)["error"]
    assert (error["reason"], error["retryable"]) == ("disk-full", True)
    assert "no space left" in full.stderr
    mount.empty()
    done = subprocess.run([*command, "--store", str(store)], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["committed"]
    assert not verify_store(open_store(str(store))).problems
