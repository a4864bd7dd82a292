"""A collector in a loop, beside writers and readers that never stop: nothing that is needed is lost."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from graphkiln.storage.store import open_for_writing, open_store
from graphkiln.storage.verify import verify_store
from tests.flows import soak

WRITERS = READERS = 8
# The whole two minutes are for the servers that test every change.
SECONDS = float(os.environ.get("GRAPHKILN_SOAK_SECONDS", "20"))


@pytest.mark.slow
def test_a_collector_beside_writers_and_readers(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    open_for_writing(store)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    roles = [*(["writer"] * WRITERS), *(["reader"] * READERS), "collector"]
    processes = [
        (
            role,
            subprocess.Popen(
                [
                    *(sys.executable, soak.__file__, role, str(number), store),
                    *(str(tmp_path / f"network-{number}"), str(SECONDS)),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**clean, "PREFECT_HOME": str(tmp_path)},
            ),
        )
        for number, role in enumerate(roles)
    ]
    done = Counter[str]()
    problems: list[str] = []
    try:
        for role, process in processes:
            printed, told = process.communicate(timeout=SECONDS + 120)
            if process.returncode or told:
                problems.append(f"{role}:\n{told}")
            else:
                done.update(json.loads(printed))
    finally:
        for _, process in processes:
            process.kill()
    assert not problems, "\n".join(problems)
    print(f"{SECONDS:.0f} s: {dict(done)}")
    assert done["committed"] > WRITERS
    assert done["loaded"] > READERS
    assert done["collections"] > SECONDS / 10
    if 2 * soak.GRACE.total_seconds() < SECONDS:
        assert done["freed"] > 0
    assert not [p.message for p in verify_store(open_store(store)).problems if p.severity == "damage"]
