import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixtral"


@pytest.fixture(scope="session")
def numerics() -> dict[str, Any]:
    """What `mixtral_numerics.py` finds. It takes half a minute, so all who use it are of one group."""
    program = Path(__file__).with_name("mixtral_numerics.py")
    run = subprocess.run([sys.executable, program, EXAMPLE], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found
