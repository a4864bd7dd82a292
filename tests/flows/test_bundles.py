"""Bundles as users make and take them: real networks, files, disks and signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphkiln
from graphkiln.flows.inspection import compiler_log
from graphkiln.storage.errors import BadInputError, CompileFailedError, NotCommittedError, StoreUnavailableError
from graphkiln.storage.store import open_store
from graphkiln.storage.verify import verify_store
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, call, outputs_of
from tests.flows.damaged_stores import EXPECTED_OF_7, KERNELS

pytestmark = pytest.mark.usefixtures("without_prefect")


class Site:
    """A network that is committed in a store.

    Attributes:
        folder: where bundles go.
        network: the network.
        store: URL of the store.
        bundle: where its bundle goes.
    """

    def __init__(self, folder: Path, network: CcNetwork, store: Path) -> None:
        self.folder = folder
        self.network = network
        self.store = str(store)
        self.bundle = folder / "kernels.bundle"
        folder.mkdir()

    def files(self) -> set[str]:
        """Return what lies beside the bundle."""
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[CcNetwork, Path]:
    """A network and a store that it is committed in, which no test may change."""
    folder = tmp_path_factory.mktemp("compiled")
    network = CcNetwork(folder / "network", KERNELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv("PREFECT_HOME", str(folder))
        graphkiln.ensure(network.spec, store=str(folder / "store"))
    assert network.take_runs() == sorted(KERNELS)
    return network, folder / "store"


@pytest.fixture
def site(compiled: tuple[CcNetwork, Path], tmp_path: Path) -> Site:
    network, store = compiled
    return Site(tmp_path / "site", network, Path(shutil.copytree(store, tmp_path / "store")))


@pytest.fixture
def changing(site: Site, tmp_path: Path) -> Site:
    """A site whose network a test may change; its compiler keeps its path, which is an option of the target."""
    network = CcNetwork(tmp_path / "network", KERNELS)
    network.spec.write_text(site.network.spec.read_text())
    site.network = network
    return site


def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
    return subprocess.run(
        [sys.executable, "-m", "graphkiln", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=clean,
        timeout=120,
        check=False,
    )


def test_a_cluster_without_a_network_loads_what_another_host_compiled(site: Site, tmp_path: Path) -> None:
    exported = run("export", site.network.spec, "-o", site.bundle, "--store", site.store)
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.splitlines()[-1].startswith(f"{site.bundle}: 1 committed variant, ")
    store = str(tmp_path / "cluster")
    imported = run("import", site.bundle, "--store", store)
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.startswith(f"  added     {NAME} for {TARGET} (variant ")

    network = graphkiln.load(NAME, target=TARGET, store=store)
    assert outputs_of(network) == outputs_of(graphkiln.load(NAME, target=TARGET, store=site.store))
    assert {graph: call(network, graph, tmp_path / "loaded", 7) for graph in network.graphs()} == EXPECTED_OF_7
    assert "this one is slow" in compiler_log(open_store(store), NAME, "scale")
    assert verify_store(open_store(store)).problems == ()
    # And nothing is compiled where the source is there as well.
    again = graphkiln.ensure(site.network.spec, store=store)
    assert again.committed_at == network.committed_at
    assert site.network.take_runs() == []


def test_python_and_the_command_line_do_the_same(site: Site, tmp_path: Path) -> None:
    made = graphkiln.export_bundle([NAME], site.bundle, store=site.store)
    other = site.folder / "other.bundle"
    told = json.loads(run("export", NAME, "-o", other, "--store", site.store, "--json").stdout)
    assert site.bundle.read_bytes() == other.read_bytes()
    assert (told["objects"], told["bytes"], told["left_out"]) == (made.objects, made.bytes, [])
    assert [item["manifest"] for item in told["variants"]] == [item.manifest for item in made.variants]

    first = graphkiln.import_bundle(site.bundle, store=str(tmp_path / "cluster"))
    assert (first.new_objects, [item.state for item in first.variants]) == (first.objects, ["added"])
    again = json.loads(run("import", other, "--store", tmp_path / "cluster", "--json").stdout)
    assert (again["new_objects"], [item["state"] for item in again["variants"]]) == (0, ["unchanged"])


def test_a_newer_commit_of_the_store_stays_and_is_told(changing: Site) -> None:
    graphkiln.export_bundle([NAME], changing.bundle, store=changing.store)
    changing.network.write_kernel("shift", "int run(int a) { return a + 12; }")
    newer = graphkiln.ensure(changing.network.spec, store=changing.store)
    done = run("import", changing.bundle, "--store", changing.store)
    assert done.returncode == 0
    assert done.stdout.startswith("  kept ")
    assert "the store has a newer commit, which stays" in done.stdout
    assert graphkiln.load(NAME, target=TARGET, store=changing.store).committed_at == newer.committed_at


def test_what_is_not_committed_is_left_out_and_told(changing: Site) -> None:
    changing.network.write_kernel("shift", "int run(int a) { return a +; }")
    with pytest.raises(CompileFailedError):
        graphkiln.ensure(changing.network.spec, parameters={"ranks": "0-7"}, store=changing.store)
    told = run("export", NAME, "-o", changing.bundle, "--store", changing.store)
    assert told.returncode == 0
    (left,) = (line.strip() for line in told.stdout.splitlines() if "left out" in line)
    assert left.startswith(f"left out {NAME} for {TARGET} (variant ")
    assert left.endswith("failed")

    made = graphkiln.export_bundle([NAME], changing.bundle, overwrite=True, store=changing.store)
    assert (len(made.variants), [item.state for item in made.left_out]) == (1, ["failed"])
    before = changing.bundle.read_bytes()
    with pytest.raises(NotCommittedError, match="compile it first"):
        graphkiln.export_bundle(
            [NAME], changing.bundle, variant=made.left_out[0].variant, overwrite=True, store=changing.store
        )
    assert changing.bundle.read_bytes() == before
    assert changing.files() == {changing.bundle.name}


@pytest.mark.parametrize(
    ("names", "target", "variant", "words"),
    [
        (["kernel"], None, "", "has no kernel; it has: kernels for native"),
        ([NAME], "fast", "", "has no kernels for fast"),
        ([NAME], None, "zz", "no variant of kernels starts with 'zz'"),
        ([NAME, "../x"], None, "", "not a valid name"),
    ],
)
def test_a_bad_name_is_told(site: Site, names: list[str], target: str | None, variant: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        graphkiln.export_bundle(names, site.bundle, target=target, variant=variant, store=site.store)
    assert site.files() == set()


def test_a_file_that_is_there_is_replaced_only_if_that_is_asked_for(site: Site) -> None:
    site.bundle.write_text("mine")
    done = run("export", NAME, "-o", site.bundle, "--store", site.store)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert site.bundle.read_text() == "mine"
    link = site.folder / "link"
    link.symlink_to(site.bundle)
    made = graphkiln.export_bundle([NAME], link, overwrite=True, store=site.store)
    assert site.bundle.stat().st_size == made.bytes
    assert link.is_symlink()
    pipe = site.folder / "pipe"
    os.mkfifo(pipe)
    for odd in (pipe, site.folder, Path("/dev/null")):
        with pytest.raises(BadInputError, match="no file") as caught:
            graphkiln.export_bundle([NAME], odd, overwrite=True, store=site.store)
        assert caught.value.reason == "file-exists"
        if odd != Path("/dev/null"):
            with pytest.raises(BadInputError, match="no file"):
                graphkiln.import_bundle(odd, store=site.store)
    assert site.files() == {"kernels.bundle", "link", "pipe"}


@pytest.mark.parametrize("where", ["nowhere/x", "kernels.toml/x", f"{'x' * 300}"])
def test_a_place_that_there_is_not_is_told(site: Site, where: str) -> None:
    file = site.network.folder / where
    with pytest.raises(BadInputError, match=r"^the bundle .*x cannot be used: "):
        graphkiln.export_bundle([NAME], file, store=site.store)
    with pytest.raises(BadInputError, match=r"^the bundle .*x cannot be used: "):
        graphkiln.import_bundle(file, store=site.store)
    assert site.files() == set()


def test_mistakes_on_the_command_line_are_one_clear_line(site: Site) -> None:
    mistakes: list[tuple[list[str | Path], str]] = [
        (["export", "nowhere.toml", "-o", site.bundle], "there is no spec nowhere.toml"),
        (["import", site.bundle], f"the bundle {site.bundle} cannot be used: No such file"),
    ]
    for arguments, words in mistakes:
        done = run(*arguments, "--store", site.store)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {words}")
        assert len(done.stderr.splitlines()) == 1
    assert site.files() == set()


def test_a_damaged_bundle_leaves_the_store_alone(site: Site, tmp_path: Path) -> None:
    graphkiln.export_bundle([NAME], site.bundle, store=site.store)
    data = site.bundle.read_bytes()
    site.bundle.write_bytes(data[: len(data) // 2])
    cluster = tmp_path / "cluster"
    done = run("import", site.bundle, "--store", cluster, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["reason"] == "damaged-bundle"
    assert not cluster.exists()


def test_a_damaged_store_exports_nothing(site: Site) -> None:
    graph = graphkiln.load(NAME, target=TARGET, store=site.store).manifest.artifacts["scale"]
    (digest,) = {ref.digest for ref in graph.values()}
    blob = Path(site.store) / "blobs" / digest[:2] / digest
    blob.write_bytes(blob.read_bytes()[:-1])
    done = run("export", NAME, "-o", site.bundle, "--store", site.store)
    assert done.returncode == 4
    assert str(blob) in done.stderr
    assert site.files() == set()


# ---------------------------------------------------------------------- interrupts and full disks


def test_an_interrupt_leaves_nothing_behind(site: Site) -> None:
    def interrupt(done: int, total: int) -> None:
        assert len(site.files()) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graphkiln.export_bundle([NAME], site.bundle, store=site.store, progress=interrupt)
    assert site.files() == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_export_and_leaves_nothing_behind(site: Site, number: signal.Signals) -> None:
    script = (
        "import contextlib, os, sys\n"
        "from graphkiln.flows.commands import bundles\n"
        "from graphkiln.flows.cli import main\n"
        "def _progress(what, as_json):\n"
        f"    return contextlib.nullcontext(lambda done, total: os.kill(os.getpid(), {int(number)}))\n"
        "bundles._progress = _progress\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "export", NAME, "-o", str(site.bundle), "--store", site.store],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 130
    assert done.stderr.strip() == "interrupted: nothing was exported"
    assert site.files() == set()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system that a bundle does not fit on."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["/bin/umount", str(folder)], check=True)


def test_a_full_disk_leaves_nothing_behind(site: Site, small_disk: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="no space left for the bundle") as caught:
        graphkiln.export_bundle([NAME], small_disk / "kernels.bundle", store=site.store)
    assert caught.value.reason == "disk-full"
    assert list(small_disk.iterdir()) == []
    # A store on it does not take half of a bundle for a network either.
    graphkiln.export_bundle([NAME], site.bundle, store=site.store)
    with pytest.raises(StoreUnavailableError):
        graphkiln.import_bundle(site.bundle, store=str(small_disk))
    with pytest.raises(NotCommittedError):
        graphkiln.load(NAME, target=TARGET, store=str(small_disk))
    assert not verify_store(open_store(str(small_disk))).damaged
