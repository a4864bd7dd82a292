"""The `xla` backend from a payload to a running program, each step in a process of its own.

The first process parses the network, the second compiles in a folder from which the network cannot be imported,
the third loads and compares with `jax.jit`. What each found out is kept, and the tests look at it.
"""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphkiln.storage.canonical import Json
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.backends.xla import XlaBackend

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the jax extra")
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the tpu extra")

NETWORK = """
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from graphkiln.tasks.contracts import Program


class State(NamedTuple):
    w: object
    momentum: object


def mesh_of(devices=None):
    types = (AxisType.Auto, AxisType.Auto)
    if devices is None:
        return AbstractMesh((2, 2), ("data", "model"), axis_types=types)
    return jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("data", "model"), axis_types=types)


def train(state, batch, key, unused):
    def loss(w):
        noise = jax.random.normal(key, batch.shape)
        return jnp.tanh((batch + 0.1 * noise) @ w["a"] @ w["b"]).std()

    value, gradient = jax.value_and_grad(loss)(state.w)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, gradient)
    return State(jax.tree.map(lambda w, m: w - 0.1 * m, state.w, momentum), momentum), {"loss": value}


def train_program(mesh):
    weights = {
        "a": jax.ShapeDtypeStruct((16, 32), "float32", sharding=NamedSharding(mesh, P(None, "model"))),
        "b": jax.ShapeDtypeStruct((32, 8), "float32", sharding=NamedSharding(mesh, P("model"))),
    }
    batch = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(mesh, P("data")))
    key = jax.eval_shape(lambda: jax.random.key(0))
    unused = jax.ShapeDtypeStruct((5,), "int32", sharding=NamedSharding(mesh, P()))
    state = State(weights, weights)
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), None)
    return Program(function=train, arguments=(state, batch, key, unused), donate=(0,), out_shardings=shardings)


def programs():
    return {"train": train_program(mesh_of())}


def solve(a):
    return jnp.linalg.cholesky(a @ a.T + jnp.eye(4, dtype=a.dtype))


def order(x):
    return jnp.sort(x)


def small():
    matrix = jax.ShapeDtypeStruct((4, 4), "float32")
    yield "solve", Program(function=solve, arguments=(matrix,))
    yield "order", Program(function=order, arguments=(jax.ShapeDtypeStruct((64,), "float32"),))


def tpu():
    spread = NamedSharding(mesh_of(), P("data", "model"))
    big = jax.ShapeDtypeStruct((2**16, 2**17), "float32", sharding=spread)
    yield "train", train_program(mesh_of())
    yield "greedy", Program(function=lambda x: (jnp.sin(x), jnp.cos(x)), arguments=(big,))
"""

PARSE = """
import pickle, sys
from graphkiln.tasks.contracts import ParseRequest
from graphkiln.tasks.frontends.jax import JaxFrontend

folder, out, *wanted = sys.argv[1:]
payloads = {}
for entry in wanted:
    callable_name, platform = entry.split("/")
    request = ParseRequest("net", folder, f"trainable.py:{callable_name}", {}, platform)
    for graph in JaxFrontend().parse(request):
        payloads[f"{callable_name}.{graph.name}"] = graph.payload
pickle.dump(payloads, open(out, "wb"))
"""

COMPILE = """
import json, os, pickle, sys
from pathlib import Path
from graphkiln.tasks.backends.xla import XlaBackend
from graphkiln.tasks.contracts import CompileRequest

payload_file, out = sys.argv[1:]
payloads = pickle.load(open(payload_file, "rb"))
backend = XlaBackend()
results = {}
for row, (graph, options, damage) in json.load(sys.stdin).items():
    settings = backend.resolve(options).settings
    # Each row is of one target environment, as in a compile child.
    os.environ.update(backend.environment(settings))
    payload = payloads[graph][: damage or None]
    try:
        outputs = backend.compile(CompileRequest(row, payload, "jax-export/1", settings, Path.cwd()))
        results[row] = {"settings": settings, "outputs": outputs}
    except Exception as error:
        results[row] = {"error": type(error).__name__, "message": str(error)}
assert "trainable" not in sys.modules
pickle.dump(results, open(out, "wb"))
"""

LOAD = """
import json, pickle, sys
import jax, jax.numpy as jnp, numpy as np
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.backends.xla import XlaBackend

folder, compiled_file = sys.argv[1:]
sys.path.insert(0, folder)
import trainable

compiled = pickle.load(open(compiled_file, "rb"))
backend = XlaBackend()

def load(row, devices=None, **changes):
    settings = {**compiled[row]["settings"], **changes}
    return backend.load(settings, compiled[row]["outputs"], devices)

def refusal(*arguments, **keywords):
    try:
        load(*arguments, **keywords)
    except BadInputError as error:
        return [error.reason, str(error)]

def run(step, devices):
    program = trainable.train_program(trainable.mesh_of(devices))
    generator = np.random.default_rng(7)
    state, batch, _, unused = jax.tree.map(
        lambda leaf: None if leaf.ndim == 0 else jax.device_put(
            generator.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding),
        program.arguments)
    seen = []
    for number in range(3):
        before = state
        state, metrics = step(before, batch, jax.random.key(number), unused)
        seen.append(jax.tree.map(np.asarray, (state, metrics)))
    deleted = [leaf.is_deleted() for leaf in jax.tree.leaves(before)]
    where = sorted(device.id for device in state.w["a"].sharding.device_set)
    return seen, deleted, where, state

found = {}
for name, devices in {"default": None, "others": jax.devices()[3:7], "backwards": jax.devices()[7:3:-1]}.items():
    bound = devices or jax.devices()[:4]
    program = trainable.train_program(trainable.mesh_of(bound))
    plain = jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out_shardings)
    wanted, wanted_deleted, _, wanted_state = run(plain, bound)
    seen, deleted, where, state = run(load("train", devices), bound)
    found[name] = {
        "same tree": jax.tree.structure(wanted) == jax.tree.structure(seen),
        "same bits": all(a.tobytes() == b.tobytes() for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(seen))),
        "moved": not np.array_equal(seen[0][0].w["a"], seen[2][0].w["a"]),
        "same shardings": jax.tree.map(lambda x: x.sharding, wanted_state) == jax.tree.map(
            lambda x: x.sharding, state),
        "deleted": deleted, "wanted deleted": wanted_deleted, "where": where,
    }

matrix = np.random.default_rng(1).normal(size=(4, 4)).astype("float32")
found["solve"] = np.array_equal(load("solve")(matrix), jax.jit(trainable.solve)(matrix))
try:
    load("solve")(matrix[:3])
except TypeError as error:
    found["wrong shape"] = str(error)
found["refusals"] = {
    "too few": refusal("train", jax.devices()[:3]),
    "twice": refusal("train", jax.devices()[:1] * 4),
    "other cpu": refusal("train", cpu={"machine": "pdp11"}),
    "no tpu": refusal("train", platform="tpu"),
    "too many wanted": refusal("wide"),
    "other contract": refusal("damaged"),
}
json.dump(found, sys.stdout)
"""


def python(script: str, *arguments: object, given: str = "", cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "TPU_"))}
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment | variables,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def compiled_rows(folder: Path, entries: list[str], rows: dict[str, Any]) -> Path:
    """Parse `entries` in one process and compile `rows` in another; return the file with the results."""
    network, elsewhere = folder / "network", folder / "elsewhere"
    network.mkdir()
    elsewhere.mkdir()
    (network / "trainable.py").write_text(NETWORK)
    python(PARSE, network, folder / "payloads", *entries, cwd=folder, PYTHONPATH=str(network))
    python(COMPILE, folder / "payloads", folder / "compiled", given=json.dumps(rows), cwd=elsewhere)
    return folder / "compiled"


def read(file: Path) -> dict[str, Any]:
    import pickle

    found: dict[str, Any] = pickle.loads(file.read_bytes())  # noqa: S301  written by the test itself
    return found


CPU = {"platform": "cpu"}
CPU_ROWS = {
    "train": ("programs.train", {**CPU, "devices": 4}, 0),
    "renamed": ("programs.train", {**CPU, "devices": 4}, 0),
    "too few devices": ("programs.train", {**CPU, "devices": 2}, 0),
    "damaged": ("programs.train", {**CPU, "devices": 4}, -500),
    "no payload": ("programs.train", {**CPU, "devices": 4}, 20),
    "solve": ("small.solve", CPU, 0),
    "order": ("small.order", CPU, 0),
    "one of four": ("small.solve", {**CPU, "devices": 4}, 0),
    "lowered for tpu": ("tpu.train", {**CPU, "devices": 4}, 0),
    "portable": ("small.solve", {**CPU, "isa": "AVX2"}, 0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def compiled_file(folder: Path) -> Path:
    entries = ["programs/cpu", "small/cpu", "tpu/tpu"]
    # JAX counts its devices once: the row with the most comes first.
    return compiled_rows(folder, entries, CPU_ROWS)


@pytest.fixture(scope="module")
def compiled(compiled_file: Path) -> dict[str, Any]:
    return read(compiled_file)


@pytest.fixture(scope="module")
def loaded(folder: Path, compiled_file: Path) -> dict[str, Any]:
    flags = "--xla_force_host_platform_device_count=8"
    output = python(LOAD, folder / "network", compiled_file, cwd=folder, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    found: dict[str, Any] = json.loads(output)
    return found
