"""What is installed: the wheel that users get."""

import ast
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import graphkiln

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        check=True,
        timeout=300,
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def test_wheel_holds_every_module_once_and_only_below_graphkiln(wheel_names: set[str]) -> None:
    wanted = {f"graphkiln/{path.name}" for path in (ROOT / "graphkiln").glob("*.py")} | {"graphkiln/py.typed"}
    for folder in ("flows", "tasks", "storage"):
        wanted |= {f"graphkiln/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in wheel_names if ".dist-info/" not in name} == wanted


def test_links_lead_type_checkers_to_the_folders() -> None:
    for folder in ("flows", "tasks", "storage"):
        assert (ROOT / "graphkiln" / folder).readlink() == Path("..") / folder


@pytest.mark.parametrize("name", graphkiln.__all__)
def test_public_name_can_be_imported_and_is_seen_by_type_checkers(name: str) -> None:
    value = getattr(graphkiln, name)
    if name == "__version__":
        return
    tree = ast.parse((ROOT / "graphkiln" / "__init__.py").read_text())
    homes = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphkiln.")
        for alias in node.names
    }
    home = homes[name]
    assert home is not None
    assert getattr(importlib.import_module(home), name) is value
    assert name in dir(graphkiln)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ensur'"):
        getattr(graphkiln, "ensur")  # noqa: B009  # mypy knows that it is not there


def test_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert version("graphkiln") == graphkiln.__version__
