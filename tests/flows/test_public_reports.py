"""What has happened to users of other compile caches, replayed. docs/known-failures.md names the test of each."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graphkiln
from graphkiln.storage import layout
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import CompileFailedError, NotCommittedError
from graphkiln.storage.pins import RunPin
from graphkiln.storage.records import ActionResult
from graphkiln.storage.store import Store, open_store
from graphkiln.storage.verify import verify_store
from graphkiln.tasks.commit import commit_manifest
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, call, outputs_of
from tests.storage.s3_servers import BUCKET, options_for

pytestmark = pytest.mark.usefixtures("without_prefect")

KERNELS = {
    "negate": "int run(int a) { return -a; }",
    "scale": "int run(int a) { return 3 * a; }",
    "shift": "int run(int a) { return a + 11; }",
}


def compile_as_json(network: CcNetwork, store: str, *options: str) -> tuple[int, dict[str, Any]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
    command = [sys.executable, "-m", "graphkiln", "compile", str(network.spec), "--no-prefect", "--json"]
    done = subprocess.run(
        [*command, "--store", store, *options],
        capture_output=True,
        text=True,
        env=clean,
        timeout=120,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_a_compiler_that_exits_with_70_is_not_counted_as_none_failed(tmp_path: Path, store_url: str) -> None:
    network = CcNetwork(tmp_path / "network", KERNELS, before='[ "$kernel" = //scale ] && exit 70')
    code, report = compile_as_json(network, store_url, "--jobs", "2")
    assert code == 3
    assert report["committed"] is False
    assert {graph["name"]: graph["state"] for graph in report["graphs"]} == {
        "negate": "compiled",
        "scale": "failed",
        "shift": "compiled",
    }
    assert "70" in next(graph["message"] for graph in report["graphs"] if graph["state"] == "failed")


def test_a_kernel_graph_of_which_nobody_knows_what_became_blocks_the_commit(tmp_path: Path, store_url: str) -> None:
    network = CcNetwork(tmp_path / "network", KERNELS)
    plan = graphkiln.ensure(network.spec, store=store_url).manifest.plan
    store = open_store(store_url)
    lost = next(graph for graph in plan.graphs if graph.name == "scale")
    store.drop_action(_result_of(store, lost.key))
    with pytest.raises(CompileFailedError, match="kernel graph scale has no result"):
        commit_manifest(plan, {}, store, RunPin(store, ("kernels", "native", plan.variant)), {})


def test_256_failed_kernel_graphs_are_not_a_success(tmp_path: Path, store_url: str) -> None:
    """Their number as the exit status would end as 0."""
    network = CcNetwork(tmp_path / "network", {})
    for number in range(256):
        (network.folder / "kernels" / f"kernel{number}.c").write_text("int run(int a) { return a +; }\n")
    code, report = compile_as_json(network, store_url)
    assert code == 3
    assert Counter(graph["state"] for graph in report["graphs"]) == {"failed": 256}
    assert report["committed"] is False


@pytest.mark.s3
@pytest.mark.xdist_group("s3")
def test_a_host_that_finds_everything_in_the_remote_store_starts_no_compiler(tmp_path: Path, s3_endpoint: str) -> None:
    network = CcNetwork(tmp_path / "network", KERNELS)
    options: dict[str, Any] = {"store": f"s3://{BUCKET}/reports", "storage_options": options_for(s3_endpoint)}
    first = graphkiln.ensure(network.spec, **options)
    assert network.take_runs() == sorted(KERNELS)
    # Another host, which has the network's source in another place, and nothing else.
    script = (
        "import json, sys, graphkiln\n"
        "network = graphkiln.ensure(sys.argv[1], **json.loads(sys.argv[2]))\n"
        "print(network.committed_at.isoformat(), *network.graphs())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(network.spec), json.dumps(options)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [first.committed_at.isoformat(), *sorted(KERNELS)]
    assert network.take_runs() == []


def test_a_rank_gets_the_program_that_has_its_rank_in_it(tmp_path: Path, store_url: str) -> None:
    """What is baked into a program is in its key; what two ranks share is one action."""
    network = CcNetwork(
        tmp_path / "network",
        {f"rank{rank}": f"int run(int a) {{ return 100 * a + {rank}; }}" for rank in range(3)}
        | {"shared": KERNELS["scale"]},
    )
    ranks = 'ranks = { rank0 = "0", rank1 = "1", rank2 = "2", shared = "0-2" }'
    network.spec.write_text(network.spec.read_text().replace('ranks = "0-3"', ranks))
    compiled = graphkiln.ensure(network.spec, store=store_url)
    assert len({graph.key for graph in compiled.manifest.plan.graphs}) == 4
    for rank in range(3):
        assert compiled.graphs(rank) == [f"rank{rank}", "shared"]
        made = [call(compiled, graph, tmp_path / "loaded", 7) for graph in compiled.graphs(rank)]
        assert made == [700 + rank, 21]


# ---------------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system that has room for some of what is compiled."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "size=36k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["/bin/umount", str(folder)], check=True)


def test_a_run_whose_disk_becomes_full_goes_on_with_what_it_compiled(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = CcNetwork(tmp_path / "network", KERNELS)
    url = str(small_disk / "store")
    with caplog.at_level(logging.WARNING, "graphkiln"):
        compiled = graphkiln.ensure(network.spec, store=url, jobs=1)
    assert len([record for record in caplog.records if "no space left for the store" in record.message]) == 1
    assert network.take_runs() == sorted(KERNELS)
    assert {graph: call(compiled, graph, tmp_path / "loaded", 7) for graph in KERNELS} == {
        "negate": -7,
        "scale": 21,
        "shift": 18,
    }
    # Nothing half is visible, and the next load says so instead of loading it.
    assert not verify_store(open_store(url)).damaged
    with pytest.raises(NotCommittedError):
        graphkiln.load(NAME, target=TARGET, store=url)

    subprocess.run(["/bin/mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    graphkiln.ensure(network.spec, store=url)
    again = network.take_runs()
    assert 0 < len(again) < len(KERNELS), "what there was room for is used"
    assert outputs_of(graphkiln.load(NAME, target=TARGET, store=url)) == outputs_of(compiled)


# ---------------------------------------------------------------------- outputs that are wrong


def test_one_bad_result_is_purged_and_compiled_again_and_no_other(tmp_path: Path, store_url: str) -> None:
    """A compiler with a bug writes an object that is almost empty, and says that all is well."""
    trouble = tmp_path / "trouble"
    trouble.touch()
    bug = f'if [ "$kernel" = //scale ] && [ -e "{trouble}" ]; then printf x > out/kernel.so; exit 0; fi'
    network = CcNetwork(tmp_path / "network", KERNELS, before=bug)
    compiled = graphkiln.ensure(network.spec, store=store_url)
    with pytest.raises(OSError, match="too short"):
        call(compiled, "scale", tmp_path / "bad", 7)
    trouble.unlink()
    network.take_runs()
    graphkiln.ensure(network.spec, store=store_url)
    assert network.take_runs() == [], "as nothing that the key is made of has changed"

    bad = next(graph.key for graph in compiled.manifest.plan.graphs if graph.name == "scale")
    store = graphkiln.open_store(store_url)
    store.drop_action(_result_of(store, bad))
    mended = graphkiln.ensure(network.spec, store=store_url)
    assert network.take_runs() == ["scale"]
    assert call(mended, "scale", tmp_path / "good", 7) == 21
    assert not verify_store(open_store(store_url)).damaged
    assert len(list((Path(store_url) / layout.ACTIONS).rglob("*/*"))) == len(KERNELS)


def _result_of(store: Store, key: Digest) -> ActionResult:
    result = store.read_action(key)
    assert result is not None
    return result
