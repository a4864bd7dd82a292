"""Training the tiny Mixtral on kernel graphs whose compile was killed, or whose store was damaged."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphkiln import open_store
from graphkiln.storage import layout
from graphkiln.storage.records import Manifest
from graphkiln.storage.verify import verify_store

pytestmark = [pytest.mark.jax, pytest.mark.slow, pytest.mark.xdist_group("mixtral-tiny")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixtral"
SPEC = EXAMPLE / "mixtral-tiny.toml"
GRAPHS = 8
STEPS = 3
# The kernel graph that takes the least time to compile again.
QUICK = "mid_opt"


def without_prefect(folder: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**clean, "PREFECT_HOME": str(folder)}


def train(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Train in a fresh process; it prints each loss with all its digits."""
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), "--steps", str(STEPS), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=without_prefect(folder),
        timeout=300,
    )


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> str:
    printed = train(tmp_path_factory.mktemp("plain"), "--plain").stdout
    assert printed.count("loss") == STEPS
    return printed


@pytest.fixture(scope="module")
def killed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that a compile left which was killed as soon as one kernel graph had compiled."""
    store = tmp_path_factory.mktemp("tiny") / "store"
    command = [sys.executable, "-u", "-m", "graphkiln", "compile", str(SPEC), "--no-prefect", "--store", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=without_prefect(store.parent)) as process:
        assert process.stdout is not None
        assert any(line.startswith("  compiled ") for line in process.stdout), "nothing compiled"
        process.kill()
    done = len(list((store / layout.ACTIONS).rglob("*/*")))
    assert 1 <= done < GRAPHS
    assert not (store / layout.REFS).exists()
    return store


@pytest.fixture(scope="module")
def finished_store(killed_store: Path, plain_losses: str) -> Path:
    """The same store after a trainer has made what was missing."""
    before = {path: path.read_bytes() for path in (killed_store / layout.ACTIONS).rglob("*/*")}
    assert train(killed_store.parent, "--store", str(killed_store)).stdout == plain_losses
    assert all(path.read_bytes() == content for path, content in before.items())
    return killed_store


def test_a_killed_compile_is_finished_by_the_trainer_and_trains_exactly_as_plain_jax(finished_store: Path) -> None:
    verification = verify_store(open_store(str(finished_store)))
    assert not verification.damaged
    assert verification.committed == 1


def test_stages_that_share_their_devices_train_the_same(plain_losses: str, numerics: dict[str, Any]) -> None:
    """Not a bit differs, so that what the numerics show of stages that do holds for those that are trained here."""
    losses = enumerate(numerics["losses"], start=1)
    assert plain_losses == "".join(f"step {step} loss {loss!r}\n" for step, loss in losses)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def any_object(folder: str) -> Callable[[Path], Path]:
    return lambda store: next(path for path in sorted((store / folder).rglob("*")) if path.is_file())


def manifest_of(store: Path) -> Manifest:
    opened = open_store(str(store))
    (variant,) = opened.variants(layout.REFS)
    ref = opened.read_ref(*variant)
    assert ref is not None
    return opened.read_manifest(ref.manifest)


def executable(store: Path) -> Path:
    (artifact,) = manifest_of(store).artifacts[QUICK].values()
    return store / layout.by_digest(layout.BLOBS, artifact.digest)


def action(store: Path) -> Path:
    (key,) = [graph.key for graph in manifest_of(store).plan.graphs if graph.name == QUICK]
    return store / layout.by_digest(layout.ACTIONS, key)


@pytest.mark.parametrize(
    ("victim", "damage"),
    [
        pytest.param(executable, flip_a_byte, id="artifact with a byte flipped"),
        pytest.param(action, Path.unlink, id="action deleted"),
        pytest.param(any_object(layout.MANIFESTS), cut_in_half, id="manifest truncated"),
        pytest.param(any_object(layout.REFS), flip_a_byte, id="ref with a byte flipped"),
        pytest.param(any_object(layout.PLANS), Path.unlink, id="plan deleted"),
    ],
)
def test_damage_is_warned_of_and_mended_and_the_losses_stay_the_same(
    finished_store: Path,
    plain_losses: str,
    tmp_path: Path,
    victim: Callable[[Path], Path],
    damage: Callable[[Path], None],
) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished_store, store)
    path = victim(store)
    damage(path)
    done = train(tmp_path, "--store", str(store))
    assert done.stdout == plain_losses
    assert str(path) in done.stderr
    assert not verify_store(open_store(str(store))).damaged
