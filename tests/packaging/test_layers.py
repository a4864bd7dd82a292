"""Who may import whom: the house plan, checked."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = {"jax", "jaxlib", "torch", "mindspore", "onnx", "libtpu"}
ALLOWED = {"storage": {"storage"}, "tasks": {"storage", "tasks"}, "flows": {"storage", "tasks", "flows"}}
MAY_IMPORT_PREFECT = {
    "tasks/prefect_tasks.py",
    *(f"flows/{name}.py" for name in ("collect", "compile_network", "engine", "precompile")),
}
MAX_LINES = 400


MODULES = [path for folder in ALLOWED for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path, *, anywhere: bool) -> Iterator[str]:
    """Yield the modules that a file imports; only those imported with it unless `anywhere`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_follow_the_layers(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    for name in imported(path, anywhere=True):
        parts = name.split(".")
        if parts[0] == "graphkiln" and len(parts) > 1:
            assert parts[1] in ALLOWED[layer], f"{layer} must not import {name}"
        assert parts[0] not in ALLOWED, f"import graphkiln.{name}, not {name}"
        if parts[0] == "prefect":
            assert path.relative_to(ROOT).as_posix() in MAY_IMPORT_PREFECT


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_framework_is_imported_with_a_module_and_none_is_too_long(path: Path) -> None:
    assert not FRAMEWORKS.intersection(name.split(".")[0] for name in imported(path, anywhere=False))
    assert len(path.read_text().splitlines()) <= MAX_LINES


def loaded_by(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_graphkiln_imports_nothing_else() -> None:
    extra = loaded_by("import graphkiln") - loaded_by("import importlib, typing")
    assert extra == {"graphkiln"}


def test_opening_a_local_store_needs_neither_fsspec_nor_pydantic() -> None:
    loaded = loaded_by("import graphkiln; graphkiln.open_store('nowhere')")
    assert not loaded & {
        "fsspec",
        "pydantic",
        "prefect",
        "pyarrow",
        "click",
        "rich",
        "psutil",
        "zstandard",
        "cryptography",
        *FRAMEWORKS,
    }
