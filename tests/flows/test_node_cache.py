"""Trainers on a real S3 server: how much they ask for, and what they get if the store or its copies are damaged."""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import graphkiln
from graphkiln.storage import layout
from graphkiln.storage.documents import seal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, NotCommittedError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.locations import open_filesystem
from graphkiln.storage.records import StoreFormat
from graphkiln.storage.store import open_store
from graphkiln.storage.verify import verify_store
from graphkiln.tasks.network import CompiledNetwork
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, outputs_of
from tests.storage.faulty_proxy import FaultyProxy
from tests.storage.s3_servers import BUCKET, options_for

pytestmark = [pytest.mark.s3, pytest.mark.xdist_group("s3"), pytest.mark.usefixtures("without_prefect")]

KERNELS = {f"kernel{number}": f"int run(int x) {{ return x + {number}; }}" for number in range(8)}
URL = f"s3://{BUCKET}/node-cache"


class Scene(NamedTuple):
    """A committed network of eight kernel graphs on S3, behind a proxy that notes every request."""

    network: CcNetwork
    proxy: FaultyProxy
    options: dict[str, str]

    def ensure(self) -> CompiledNetwork:
        return graphkiln.ensure(self.network.spec, store=URL, storage_options=self.options)

    def load(self) -> CompiledNetwork:
        return graphkiln.load(NAME, target=TARGET, store=URL, storage_options=self.options)

    def filesystem(self) -> StoreFilesystem:
        return open_filesystem(URL, self.options)

    def asked(self) -> list[str]:
        """What was asked for since the last time, as method and folder."""
        requests = [(method, path.removeprefix(f"/{BUCKET}/node-cache/")) for method, path in self.proxy.asked]
        self.proxy.reset()
        return sorted(f"{method} {'list' if path == f'/{BUCKET}' else path.split('/')[0]}" for method, path in requests)


@pytest.fixture(scope="module")
def scene(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("node-cache")
    with FaultyProxy(s3_endpoint).running() as proxy, pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))
        made = Scene(CcNetwork(folder / "network", KERNELS), proxy, options_for(proxy.url))
        made.ensure()
        yield made


@pytest.fixture
def cache(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache, which is used from now on."""
    monkeypatch.setenv("GRAPHKILN_NODE_CACHE", str(tmp_path / "node"))
    scene.proxy.reset()
    return tmp_path / "node"


def test_the_first_rank_of_a_host_makes_12_requests_and_the_others_3(scene: Scene, cache: Path) -> None:
    ready = scene.load().load_all()
    assert list(ready) == list(KERNELS)
    few = ["GET plans", "GET refs", "GET list"]
    assert scene.asked() == sorted([*few, "GET manifests", *["GET blobs"] * 8])
    network = scene.load()
    again = network.load_all(rank=2)
    for graph in network.graphs(rank=2):
        network.load(graph)
    assert {name: kernel.outputs for name, kernel in again.items()} == {
        name: kernel.outputs for name, kernel in ready.items()
    }
    assert scene.asked() == sorted(few)


def test_without_a_cache_every_rank_makes_12_requests(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_NODE_CACHE", "off")
    scene.proxy.reset()
    for _ in range(2):
        scene.load().load_all()
        assert len(scene.asked()) == 12


def test_what_ensure_has_read_is_not_downloaded_again(scene: Scene, cache: Path) -> None:
    network = scene.ensure()
    assert "GET blobs" in scene.asked()
    network.load_all()
    assert scene.asked() == []
    scene.load().load_all()
    assert scene.asked() == sorted(["GET plans", "GET refs", "GET list"])


# Loads all kernel graphs as a rank does, once it is told to; prints their bytes.
RANK = """
import json, sys
import graphkiln

name, target, store, options = sys.argv[1:]
graphkiln.open_store(store, json.loads(options), checked=False)  # which imports the client
print("ready", flush=True)
sys.stdin.readline()
network = graphkiln.load(name, target=target, store=store, storage_options=json.loads(options))
print(sorted((name, kernel.outputs) for name, kernel in network.load_all().items()))
"""


@contextmanager
def started_ranks(scene: Scene, number: int) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that load once they are told to, and do not outlive the block."""
    command = [sys.executable, "-c", RANK, NAME, TARGET, URL, json.dumps(scene.options)]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
def test_8_ranks_of_a_host_download_each_artifact_once(scene: Scene, cache: Path) -> None:
    with started_ranks(scene, 8) as ranks, ThreadPoolExecutor(8) as threads:
        printed = set(threads.map(lambda rank: rank.communicate("go\n", timeout=120)[0], ranks))
    expected = sorted((name, kernel.outputs) for name, kernel in scene.load().load_all().items())
    assert printed == {f"{expected}\n"}
    asked = Counter(scene.asked())
    assert (asked["GET blobs"], asked["GET manifests"]) == (8, 1)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_downloads_holds_nobody_up(scene: Scene, cache: Path) -> None:
    downloading, released = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if "/blobs/" in path and not released.is_set():
            downloading.set()
            released.wait(60)

    with started_ranks(scene, 1) as (rank,), ThreadPoolExecutor(1) as thread:
        scene.proxy.fault = hold
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()
        assert downloading.wait(60)
        ready = thread.submit(lambda: scene.load().load_all())
        rank.kill()
        rank.wait()
        released.set()
        assert list(ready.result(60)) == list(KERNELS)
    scene.proxy.reset()
    scene.load().load_all()
    assert scene.asked() == sorted(["GET plans", "GET refs", "GET list"])


def test_a_damaged_copy_is_downloaded_again(scene: Scene, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = outputs_of(scene.load())
    copies = [path for path in cache.rglob("??/*") if path.is_file()]
    assert len(copies) == 9
    for path in copies:
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    scene.asked()
    assert outputs_of(scene.load()) == expected
    assert Counter(scene.asked()) == {"GET blobs": 8, "GET manifests": 1, "GET refs": 1, "GET plans": 1, "GET list": 1}
    assert len(caplog.records) == 9


def test_what_the_store_has_lost_is_made_again_though_this_host_has_a_copy(
    scene: Scene, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the manifest would name what no other host can load."""
    network = scene.load()
    expected = outputs_of(network)
    lost = next(iter(network.manifest.artifacts["kernel3"].values()))
    scene.filesystem().delete(layout.by_digest(layout.BLOBS, lost.digest))
    assert outputs_of(scene.load()) == expected
    scene.network.take_runs()
    scene.ensure()
    assert scene.network.take_runs() == ["kernel3"]
    assert f"{lost.digest} (output kernel.so of the action" in caplog.records[0].getMessage()
    assert not verify_store(open_store(URL, scene.options)).damaged


def test_who_has_no_copy_is_told_what_the_store_has_lost(scene: Scene, cache: Path) -> None:
    network = scene.load()
    lost = next(iter(network.manifest.artifacts["kernel5"].values()))
    path = layout.by_digest(layout.BLOBS, lost.digest)
    stored = scene.filesystem().read(path)
    scene.filesystem().delete(path)
    try:
        for load in (lambda: network.load("kernel5"), network.load_all):
            with pytest.raises(
                DamagedStoreError, match=r"output kernel\.so of kernel5 in kernels for native .* missing"
            ):
                load()
        network.load("kernel4")
    finally:
        scene.filesystem().create(path, stored)
    network.load("kernel5")


def test_a_verification_reads_the_store_and_leaves_no_copies(scene: Scene, cache: Path) -> None:
    scene.load().load_all()
    lost = next(iter(scene.load().manifest.artifacts["kernel1"].values()))
    path = layout.by_digest(layout.BLOBS, lost.digest)
    before = sorted(cache.rglob("*"))
    stored = scene.filesystem().read(path)
    scene.filesystem().delete(path)
    try:
        found = verify_store(open_store(URL, scene.options))
    finally:
        scene.filesystem().create(path, stored)
    assert path in [problem.path for problem in found.problems if problem.severity == "damage"]
    assert sorted(cache.rglob("*")) == before


def test_a_store_of_a_newer_version_is_named_if_nothing_suits(scene: Scene) -> None:
    newer = f"{URL}-newer"
    open_filesystem(newer, scene.options).create(layout.FORMAT, seal("store format", StoreFormat(99, "blake3")))
    with pytest.raises(BadInputError, match=r"has format 99 .* upgrade GraphKiln"):
        graphkiln.load(NAME, target=TARGET, store=newer, storage_options=scene.options)
    with pytest.raises(NotCommittedError, match="committed there: nothing"):
        graphkiln.load(NAME, target=TARGET, store=f"{URL}-empty", storage_options=scene.options)


def test_a_cache_that_cannot_be_is_named_before_anything_is_asked(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHKILN_NODE_CACHE_SIZE", "plenty")
    monkeypatch.setenv("GRAPHKILN_NODE_CACHE", "/somewhere")
    scene.proxy.reset()
    for use in (scene.load, scene.ensure):
        with pytest.raises(BadInputError, match="GRAPHKILN_NODE_CACHE_SIZE: 'plenty' is no size"):
            use()
    assert scene.asked() == []
