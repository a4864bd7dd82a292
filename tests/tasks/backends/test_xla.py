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
from graphkiln.tasks.backends.xla_toolchain import VARIABLE, toolchain_variable

pytestmark = pytest.mark.xdist_group("xla")
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
    yield "order", Program(function=order, arguments=(jax.ShapeDtypeStruct((16,), "float32"),))


def deep(x, weights):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def tpu():
    spread = NamedSharding(mesh_of(), P("data", "model"))
    big = jax.ShapeDtypeStruct((2**16, 2**17), "float32", sharding=spread)
    yield "train", train_program(mesh_of())
    rows, columns = NamedSharding(mesh_of(), P("data")), NamedSharding(mesh_of(), P(None, None, "model"))
    x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16", sharding=rows)
    weights = jax.ShapeDtypeStruct((8, 4096, 4096), "bfloat16", sharding=columns)
    yield "deep", Program(function=deep, arguments=(x, weights))
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
import json, pickle, sys
from pathlib import Path
from graphkiln.tasks.backends.xla import XlaBackend
from graphkiln.tasks.contracts import CompileRequest

payload_file, out = sys.argv[1:]
payloads = pickle.load(open(payload_file, "rb"))
backend = XlaBackend()
results = {}
for row, (graph, options, damage) in json.load(sys.stdin).items():
    settings = backend.resolve(options).settings
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

def load(row, devices=None, contract=lambda data: data, **changes):
    settings = {**compiled[row]["settings"], **changes}
    outputs = compiled[row]["outputs"]
    return backend.load(settings, {**outputs, "contract": contract(outputs["contract"])}, devices)

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
found["order"] = np.array_equal(load("order")(matrix.ravel()), jax.jit(trainable.order)(matrix.ravel()))
try:
    load("solve")(matrix[:3])
except TypeError as error:
    found["wrong shape"] = str(error)
found["refusals"] = {
    "too few": refusal("train", jax.devices()[:3]),
    "twice": refusal("train", jax.devices()[:1] * 4),
    "other cpu": refusal("train", cpu={"machine": "pdp11"}),
    "no tpu": refusal("train", platform="tpu"),
    "small host": refusal("train", contract=lambda data: data.replace(b'"devices":4', b'"devices":16')),
    "no contract": refusal("train", contract=lambda data: b"{}"),
    "named tuple gone": refusal("train", contract=lambda data: data.replace(b":State", b":Stat")),
    "named tuple of a module that is not imported": refusal(
        "train", contract=lambda data: data.replace(b"trainable:", b"this:")
    ),
    "named tuple changed": refusal("train", contract=lambda data: data.replace(b"momentum", b"momenta")),
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


def parsed(folder: Path, *entries: str) -> Path:
    """Parse ``callable/platform`` entries of the network; return the file with the payloads."""
    network = folder / "network"
    network.mkdir()
    (network / "trainable.py").write_text(NETWORK)
    python(PARSE, network, folder / "payloads", *entries, cwd=folder, PYTHONPATH=str(network))
    return folder / "payloads"


def compiled_rows(payloads: Path, name: str, options: dict[str, Json], rows: dict[str, Any]) -> Path:
    """Compile `rows` in a child with the environment of the target `options`; return the file with the results."""
    elsewhere = payloads.parent / f"elsewhere-{name}"
    elsewhere.mkdir()
    backend = XlaBackend()
    variables = backend.environment(backend.resolve(options).settings)
    python(COMPILE, payloads, elsewhere / "compiled", given=json.dumps(rows), cwd=elsewhere, **variables)
    return elsewhere / "compiled"


def read(file: Path) -> dict[str, Any]:
    import pickle

    found: dict[str, Any] = pickle.loads(file.read_bytes())  # noqa: S301  written by the test itself
    return found


CPU: dict[str, Json] = {"platform": "cpu"}
FOUR: dict[str, Json] = {"platform": "cpu", "devices": 4}
AVX2: dict[str, Json] = {"platform": "cpu", "isa": "AVX2"}
# graph, options, where the payload is cut off
CPU_ROWS = {
    "train": ("programs.train", FOUR, 0),
    "renamed": ("programs.train", FOUR, 0),
    "too few devices": ("programs.train", {"platform": "cpu", "devices": 2}, 0),
    "too many devices": ("programs.train", {"platform": "cpu", "devices": 64}, 0),
    "cut short": ("programs.train", FOUR, 60),
    "no payload": ("programs.train", FOUR, 5),
    "solve": ("small.solve", CPU, 0),
    "order": ("small.order", CPU, 0),
    "one of four": ("small.solve", FOUR, 0),
    "lowered for tpu": ("tpu.train", FOUR, 0),
    "isa unknown to the process": ("small.solve", AVX2, 0),
    "bad compiler option": ("small.solve", {"platform": "cpu", "compiler_options": {"xla_no_such_thing": True}}, 0),
}
V5E: dict[str, Json] = {"platform": "tpu", "topology": "v5e:2x2"}
TPU_ROWS = {
    "default": ("tpu.deep", V5E, 0),
    "O0": ("tpu.deep", {**V5E, "effort": "O0"}, 0),
    "greedy": ("tpu.greedy", {**V5E, "effort": "O0"}, 0),
    "larger slice": ("tpu.train", {**V5E, "topology": "v5e:4x4"}, 0),
    "no such slice": ("tpu.train", {**V5E, "topology": "v5e:4by4"}, 0),
}


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parsed(tmp_path_factory.mktemp("xla"), "programs/cpu", "small/cpu", "tpu/tpu")


@pytest.fixture(scope="module")
def compiled_file(payloads: Path) -> Path:
    return compiled_rows(payloads, "cpu", FOUR, CPU_ROWS)


@pytest.fixture(scope="module")
def compiled(compiled_file: Path) -> dict[str, Any]:
    return read(compiled_file)


@pytest.fixture(scope="module")
def loaded(payloads: Path, compiled_file: Path) -> dict[str, Any]:
    folder = payloads.parent
    flags = "--xla_force_host_platform_device_count=8"
    output = python(LOAD, folder / "network", compiled_file, cwd=folder, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    found: dict[str, Any] = json.loads(output)
    return found


@pytest.fixture(scope="module")
def compiled_for_tpu(payloads: Path) -> dict[str, Any]:
    return read(compiled_rows(payloads, "tpu", V5E, TPU_ROWS))


@needs_jax
@pytest.mark.jax
@pytest.mark.parametrize(("devices", "where"), [("default", [0, 1, 2, 3]), ("others", [3, 4, 5, 6])])
def test_loaded_program_equals_jit_to_the_bit(loaded: dict[str, Any], devices: str, where: list[int]) -> None:
    found = loaded[devices]
    assert found["where"] == where
    assert found["moved"]
    assert found["same tree"]
    assert found["same bits"]
    assert found["same shardings"]
    assert found["deleted"] == found["wanted deleted"] == [True] * 4


@needs_jax
@pytest.mark.jax
def test_devices_are_taken_in_the_order_given(loaded: dict[str, Any]) -> None:
    found = loaded["backwards"]
    assert found["where"] == [4, 5, 6, 7]
    assert found["same bits"]
    assert found["same shardings"]


@needs_jax
@pytest.mark.jax
@pytest.mark.parametrize("row", ["solve", "order"])
def test_program_with_run_time_helpers_runs_where_nothing_was_lowered(loaded: dict[str, Any], row: str) -> None:
    # LAPACK and the comparison of a sort are found by the process that compiles, not by XLA.
    assert loaded[row]


@needs_jax
@pytest.mark.jax
def test_wrong_argument_is_named(loaded: dict[str, Any]) -> None:
    assert "Argument '[0]' compiled with float32[4,4] and called with float32[3,4]" in loaded["wrong shape"]


@needs_jax
@pytest.mark.jax
@pytest.mark.parametrize(
    ("row", "reason", "fragment"),
    [
        ("too few", "device-count-mismatch", "4 different devices, and 3 were given"),
        ("twice", "device-count-mismatch", "4 different devices"),
        ("other cpu", "other-cpu", "another CPU"),
        ("no tpu", "no-such-device", "no tpu device"),
        ("small host", "too-few-devices", "needs 16 cpu devices, and JAX has 8 here"),
        ("no contract", "bad-contract", "contract"),
        ("named tuple gone", "named-tuple-changed", "trainable"),
        ("named tuple of a module that is not imported", "named-tuple-not-imported", "import this before"),
        ("named tuple changed", "named-tuple-changed", "no longer has the fields"),
    ],
)
def test_load_refuses(loaded: dict[str, Any], row: str, reason: str, fragment: str) -> None:
    found = loaded["refusals"][row]
    assert found is not None
    assert found[0] == reason
    assert fragment in found[1]


@needs_jax
@pytest.mark.jax
def test_contract_depends_on_nothing_but_the_program(compiled: dict[str, Any]) -> None:
    assert compiled["renamed"]["outputs"]["contract"] == compiled["train"]["outputs"]["contract"]
    for data in compiled["train"]["outputs"].values():
        assert data
        assert str(Path(__file__).parents[3]).encode() not in data
        assert b"site-packages" not in data


@needs_jax
@pytest.mark.jax
@pytest.mark.parametrize(
    ("row", "error", "fragment"),
    [
        ("too few devices", "BadInputError", "made for 4 devices, and the target has 2 devices"),
        ("too many devices", "RuntimeError", "started with 4 CPU devices, and the target has 64"),
        ("one of four", "BadInputError", "made for 1 device, and the target has 4 devices; give its arguments"),
        ("lowered for tpu", "BadInputError", "lowered for tpu, and the target is cpu"),
        ("cut short", "BadInputError", "jax-export/1"),
        ("no payload", "BadInputError", "jax-export/1"),
        ("isa unknown to the process", "RuntimeError", "--xla_cpu_max_isa=AVX2"),
        ("bad compiler option", "JaxRuntimeError", "xla_no_such_thing"),
    ],
)
def test_compile_fails_with_the_reason(compiled: dict[str, Any], row: str, error: str, fragment: str) -> None:
    assert "error" in compiled[row], "it compiled"
    assert compiled[row]["error"] == error
    assert fragment in compiled[row]["message"]


@needs_jax
@pytest.mark.jax
@pytest.mark.skipif(platform.machine() != "x86_64", reason="isa is for x86_64")
def test_isa_limits_the_instructions(payloads: Path, compiled: dict[str, Any]) -> None:
    limited = read(compiled_rows(payloads, "isa", AVX2, {"solve": ("small.solve", AVX2, 0)}))["solve"]
    assert b"+avx2" in limited["outputs"]["executable"]
    assert b"+avx512" not in limited["outputs"]["executable"]
    assert limited["settings"]["cpu"] != compiled["solve"]["settings"]["cpu"]


@needs_libtpu
@pytest.mark.tpu
def test_effort_reaches_the_tpu_compiler(compiled_for_tpu: dict[str, Any]) -> None:
    # Without the unrolling of the better efforts the code is a third as large, and compiled in a quarter of the time.
    default, fast = (len(compiled_for_tpu[row]["outputs"]["executable"]) for row in ("default", "O0"))
    assert fast < 0.6 * default


@needs_libtpu
@pytest.mark.tpu
@pytest.mark.parametrize(
    ("row", "error", "fragments"),
    [
        ("greedy", "JaxRuntimeError", ["RESOURCE_EXHAUSTED", "HBM"]),
        ("larger slice", "BadInputError", ["made for 4 devices", "topology v5e:4x4 has 16 devices"]),
        ("no such slice", "BadInputError", ["v5e:4by4", "v5e:4x4"]),
    ],
)
def test_tpu_compile_fails_with_the_reason(
    compiled_for_tpu: dict[str, Any], row: str, error: str, fragments: list[str]
) -> None:
    assert "error" in compiled_for_tpu[row], "it compiled"
    assert compiled_for_tpu[row]["error"] == error
    for fragment in fragments:
        assert fragment in compiled_for_tpu[row]["message"]


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({}, "option platform of the xla backend: missing; give one of cpu, tpu"),
        ({"platform": "gpu"}, "'gpu': did you mean tpu?"),
        ({"platform": 3}, "3 is not text"),
        ({"platform": "cpu", "device": 4}, "no option device: did you mean devices?"),
        ({"platform": "cpu", "zzz": 4}, "no option zzz: it knows platform"),
        ({"platform": "cpu", "topology": "v5e:4x4"}, "topology is for platform tpu"),
        ({"platform": "tpu", "topology": "v5e:4x4", "devices": 4}, "devices is for platform cpu"),
        ({"platform": "tpu"}, "topology of the xla backend: missing"),
        ({"platform": "tpu", "topology": 4}, "4 is not the name of a slice"),
        ({"platform": "cpu", "devices": 0}, "0 is not a whole number from 1"),
        ({"platform": "cpu", "devices": True}, "True is not a whole number"),
        ({"platform": "cpu", "devices": "4"}, "'4' is not a whole number"),
        ({"platform": "cpu", "effort": "O4"}, "'O4': it knows default, O0"),
        ({"platform": "cpu", "effort": 0}, "0 is not text"),
        ({"platform": "cpu", "compiler_options": ["a"]}, "is not a table"),
        ({"platform": "cpu", "compiler_options": {"a": None}}, "a is None, not a text"),
        ({"platform": "cpu", "compiler_options": {"a": float("nan")}}, "nan cannot be written"),
        ({"platform": "cpu", "compiler_options": {"xla_cpu_max_isa": "AVX2"}}, "what the option isa sets"),
    ],
)
def test_resolve_refuses(options: dict[str, Json], fragment: str) -> None:
    with pytest.raises(BadInputError) as caught:
        XlaBackend().resolve(options)
    assert fragment in str(caught.value)
    assert caught.value.reason in ("unknown-option", "bad-option")


def test_resolve_fills_in_defaults_and_the_host_cpu() -> None:
    resolution = XlaBackend().resolve({"platform": "cpu"})
    assert resolution.platform == "cpu"
    settings = resolution.settings
    cpu = settings.pop("cpu")
    assert isinstance(cpu, dict)
    assert cpu["machine"] == platform.machine()
    assert settings == {"platform": "cpu", "devices": 1, "effort": "default", "isa": None, "compiler_options": {}}


def test_resolve_keeps_the_host_cpu_out_of_a_tpu_target() -> None:
    options: dict[str, Json] = {"topology": "v5p:4x4x4", "platform": "tpu", "compiler_options": {"xla_x": 1}}
    assert XlaBackend().resolve(options).settings == {**options, "effort": "default"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="isa is for x86_64")
def test_isa_takes_model_and_ruled_out_flags_out_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(flags: str, isa: str) -> Json:
        host = {"machine": "x86_64", "model": flags, "flags": flags}
        monkeypatch.setattr("graphkiln.tasks.backends.xla.cpu_features", lambda: host)
        return XlaBackend().resolve({"platform": "cpu", "isa": isa}).settings["cpu"]

    assert resolved("avx avx2 fma", "AVX2") == resolved("avx avx2 avx512f avx512_vnni amx_int8 fma", "AVX2")
    assert resolved("avx avx2 fma", "AVX2") != resolved("avx avx2 avx_vnni fma", "AVX2")
    assert resolved("avx avx2 fma", "AVX512") != resolved("avx avx2 avx512f fma", "AVX512")
    assert resolved("sse4_2", "SSE4_2") == resolved("sse4_2 avx avx2 fma f16c", "SSE4_2")


@needs_jax
@pytest.mark.jax
def test_resolve_fingerprint_and_environment_import_no_jax(tmp_path: Path) -> None:
    script = """
import sys
from graphkiln.tasks.backends.xla import XlaBackend
backend = XlaBackend()
settings = backend.resolve({"platform": "cpu", "devices": 3}).settings
names = {part.name for part in backend.fingerprint(settings)}
assert {"jax.version", "jaxlib.version", "jaxlib.record"} <= names, names
assert "--xla_force_host_platform_device_count=3" in backend.environment(settings)["XLA_FLAGS"]
assert "jax" not in sys.modules
"""
    python(script, cwd=tmp_path)


@needs_libtpu
@pytest.mark.tpu
def test_tpu_fingerprint_names_libtpu() -> None:
    backend = XlaBackend()
    settings = backend.resolve(V5E).settings
    assert {"libtpu.version", "jaxlib.version"} <= {part.name for part in backend.fingerprint(settings)}


CHECK = """
import sys
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.backends.xla_toolchain import check_toolchain
try:
    check_toolchain({"platform": "cpu"})
    print("sound")
except BadInputError as error:
    print(error.reason, error)
"""


@needs_jax
@pytest.mark.jax
def test_the_compiler_that_is_imported_must_be_the_one_in_the_key(tmp_path: Path) -> None:
    sound = toolchain_variable({"platform": "cpu"})
    assert python(CHECK, cwd=tmp_path, **{VARIABLE: sound}).strip() == "sound"
    other = json.dumps({**json.loads(sound), "jaxlib.version": "0.0.1"})
    found = python(CHECK, cwd=tmp_path, **{VARIABLE: other})
    assert found.startswith("other-toolchain jaxlib.version is ")
    assert "0.0.1 where the key is made" in found
    # A module without metadata comes first on the path.
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").touch()
    found = python(CHECK, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert found.startswith(f"other-toolchain the module jax is {tmp_path / 'jax' / '__init__.py'}, and the installed")
