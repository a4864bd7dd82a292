"""What is run is the source as it is now, whatever bytecode lies beside it."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphkiln
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.contracts import ParseRequest
from graphkiln.tasks.frontends.python_entrypoint import _is_installed, check_program_name
from graphkiln.tasks.sandbox.limits import Limits
from graphkiln.tasks.sandbox.pool import ChildPool

SCRIPT = """
import sys
from graphkiln.tasks.contracts import ParseRequest
from graphkiln.tasks.frontends.python_entrypoint import Entrypoint

entrypoint = Entrypoint(ParseRequest("n", sys.argv[1], sys.argv[2], {}, ""))
with entrypoint.import_path():
    print(entrypoint.call())
"""
FILES = {
    "network.py": "import sibling, package.part\ndef programs():\n    return 1, sibling.VALUE, package.part.VALUE\n",
    "sibling.py": "VALUE = 1\n",
    "package/__init__.py": "",
    "package/part.py": "VALUE = 1\n",
}
LONG_AGO = 1_000_000_000


def run(folder: Path, entrypoint: str, *, plainly: bool = False) -> str:
    """Call the entrypoint in a fresh process that writes bytecode, as an ordinary Python does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    script = "import network; print(network.programs())" if plainly else SCRIPT
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), entrypoint],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=environment,
    )
    return done.stdout.strip()


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.mark.parametrize("entrypoint", ["network.py:programs", "network:programs"])
@pytest.mark.parametrize(
    ("edited", "found"), [("network.py", "(2, 1, 1)"), ("sibling.py", "(1, 2, 1)"), ("package/part.py", "(1, 1, 2)")]
)
def test_an_edit_that_keeps_size_and_time_is_seen(tmp_path: Path, entrypoint: str, edited: str, found: str) -> None:
    for name, text in FILES.items():
        write(tmp_path, name, text)
    assert run(tmp_path, entrypoint) == "(1, 1, 1)"
    assert not list(tmp_path.rglob("__pycache__"))
    assert run(tmp_path, "", plainly=True) == "(1, 1, 1)"
    assert list(tmp_path.rglob("__pycache__"))
    write(tmp_path, edited, FILES[edited].replace("VALUE = 1", "VALUE = 2").replace("return 1", "return 2"))
    # Plain Python runs what was there before, which is why this matters.
    assert run(tmp_path, "", plainly=True) == "(1, 1, 1)"
    assert run(tmp_path, entrypoint) == found


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder below the checkout of GraphKiln, as its examples have."""
    folder = Path(graphkiln.__file__).resolve().parents[1] / f"stale-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_a_network_beside_graphkiln_is_run_as_it_is(own_folder: Path) -> None:
    write(own_folder, "network.py", "def programs():\n    return 1\n")
    assert run(own_folder, "", plainly=True) == "1"
    write(own_folder, "network.py", "def programs():\n    return 2\n")
    assert run(own_folder, "network.py:programs") == "2"


def test_what_is_installed_keeps_its_bytecode(tmp_path: Path) -> None:
    assert _is_installed(Path(os.__file__))
    assert _is_installed(Path(pytest.__file__))
    assert not _is_installed(tmp_path / "network.py")
    packages = Path(sysconfig.get_path("purelib"))
    assert not _is_installed(packages / os.path.relpath(tmp_path, packages) / "network.py")


def test_a_link_in_the_installation_to_what_somebody_edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages, store, mine = tmp_path / "packages", tmp_path / "store" / "site-packages", tmp_path / "mine"
    for folder in (packages, store, mine):
        folder.mkdir(parents=True)
    (packages / "edited").symlink_to(mine)
    (packages / "linked").symlink_to(store)
    monkeypatch.setattr("graphkiln.tasks.frontends.python_entrypoint._installation", lambda: frozenset({packages}))
    assert not _is_installed(packages / "edited" / "a.py")
    assert _is_installed(packages / "linked" / "a.py")
    assert _is_installed(packages / "a.py")


@pytest.mark.jax
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the jax extra")
def test_the_payload_is_that_of_the_edited_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    folder, elsewhere = tmp_path / "network", tmp_path / "elsewhere"
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    files = {
        folder / "network.py": (
            "import jax, numpy as np, sibling, common\nfrom graphkiln.tasks.contracts import Program\n"
            "X = jax.ShapeDtypeStruct((4,), np.float32)\n"
            "def programs():\n"
            "    return {'p': Program(function=lambda x: x * 3 + sibling.N - common.N, arguments=(X,))}\n"
        ),
        folder / "sibling.py": "N = 5\n",
        elsewhere / "common.py": "N = 7\n",
    }
    for path, text in files.items():
        write(path.parent, path.name, text)

    def digest() -> str:
        request = ParseRequest("net", str(folder), "network.py:programs", {}, "cpu")
        return digest_bytes(pool.parse("jax", request).value[0].payload)

    with ChildPool(environment={}, jobs=1, limits=Limits(seconds=120, memory_bytes=2**33)) as pool:
        found = [digest()]
        for path, text in files.items():
            write(path.parent, path.name, text.replace("= 5", "= 6").replace("= 7", "= 8").replace("* 3", "* 4"))
            found.append(digest())
    assert len(set(found)) == 4
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.parametrize("name", ["_hidden", "", "a b", "a/b", 3, None])
def test_names_are_those_that_a_store_can_have(name: object) -> None:
    with pytest.raises(BadInputError) as caught:
        check_program_name("network.py:programs", name)
    assert caught.value.reason == "bad-name"
