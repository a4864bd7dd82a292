"""The example `cc`: its spec resolves, its kernels compile with the real C compiler, and what comes out runs."""

import ctypes
import shutil
from pathlib import Path

import pytest

from graphkiln.tasks.backends.command import CommandBackend
from graphkiln.tasks.contracts import CompileRequest
from graphkiln.tasks.frontends.file import FileFrontend
from graphkiln.tasks.resolve import resolve

SPEC = Path(__file__).parents[2] / "examples" / "cc" / "saxpy.toml"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no cc")
def test_the_example_compiles_and_its_kernels_run(tmp_path: Path) -> None:
    resolved = resolve(SPEC)
    backend = CommandBackend()
    libraries: dict[str, ctypes.CDLL] = {}
    for graph in FileFrontend().parse(resolved.parse_request()):
        assert str(graph.ranks) == "0-3"
        folder = tmp_path / graph.name
        folder.mkdir()
        settings = resolved.target.settings
        outputs = backend.compile(
            CompileRequest(graph.name, graph.payload, graph.payload_format, settings=settings, folder=folder)
        )
        files = backend.load(settings, outputs, None).write_to(tmp_path / "loaded" / graph.name)
        libraries[graph.name] = ctypes.CDLL(str(files["kernel.so"]))
    assert list(libraries) == ["axpby", "dot", "saxpy"]

    x, y = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)(10, 20, 30)
    libraries["saxpy"].saxpy(3, ctypes.c_float(2), x, y)
    assert list(y) == [12, 24, 36]
    libraries["axpby"].axpby(3, ctypes.c_float(1), x, ctypes.c_float(0.5), y)
    assert list(y) == [7, 14, 21]
    libraries["dot"].dot.restype = ctypes.c_double
    assert libraries["dot"].dot(3, x, y) == 98.0
