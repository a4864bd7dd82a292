"""What is run is the source as it is now, whatever bytecode lies beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
