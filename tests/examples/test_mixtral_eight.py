"""Eight trainers that start at the same moment on a cold store: the real compiler runs once for each kernel graph."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from graphkiln import open_store
from graphkiln.storage import layout
from graphkiln.storage.verify import verify_store
from tests.examples.test_mixtral_tiny import EXAMPLE, GRAPHS, without_prefect
from tests.storage.catalogs import rows_in

pytestmark = [pytest.mark.jax, pytest.mark.slow, pytest.mark.xdist_group("mixtral-eight")]

TRAINERS = 8


def test_eight_trainers_compile_each_kernel_graph_once_and_all_of_them_train(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, str(EXAMPLE / "train.py"), "--steps", "1", "--store", str(store)]
    trainers = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=without_prefect(tmp_path)
        )
        for _ in range(TRAINERS)
    ]
    try:
        ended = [trainer.communicate(timeout=400) for trainer in trainers]
    finally:
        for trainer in trainers:
            trainer.kill()
    assert [told for _, told in ended if told] == []
    (losses,) = {printed for printed, _ in ended}
    assert losses.startswith("step 1 loss ")

    opened = open_store(str(store))
    compiled = Counter(row["kernel_graph"] for row in rows_in(opened) if row["outcome"] == "compiled")
    assert len(compiled) == GRAPHS
    assert set(compiled.values()) == {1}
    for folder, count in ((layout.ACTIONS, GRAPHS), (layout.MANIFESTS, 1), (layout.REFS, 1), (layout.LEASES, 0)):
        assert len(list(opened.names(folder))) == count, folder
    assert not verify_store(opened).problems
