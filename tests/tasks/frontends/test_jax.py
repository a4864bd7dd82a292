"""What moves a payload and what does not, and how bad input reads.

Each row is a small edit of a network's source. All rows are parsed in one fresh process, in other folders, under
other file names and with another hash seed than the process that parses the original.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.jax,
    pytest.mark.xdist_group("jax-frontend"),
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the jax extra"),
]

PARSE = """
import json, sys
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.contracts import ParseRequest
from graphkiln.tasks.frontends.jax import JaxFrontend

path = list(sys.path)
results = {}
for row, request in json.load(sys.stdin).items():
    try:
        graphs = JaxFrontend().parse(ParseRequest(**request))
        results[row] = {graph.name: [digest_bytes(graph.payload), str(graph.ranks)] for graph in graphs}
    except BadInputError as error:
        results[row] = {"reason": error.reason, "message": str(error)}
assert sys.path == path
json.dump(results, sys.stdout)
"""

BASE = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from graphkiln.tasks.contracts import Program

AXIS_TYPES = (AxisType.Auto, AxisType.Auto)
MESH = AbstractMesh((2, 2), ("x", "y"), axis_types=AXIS_TYPES)
TABLE = np.arange(8, dtype="float32")


def sharded(*spec):
    return NamedSharding(MESH, P(*spec))


def helper(a):
    return a * 2.0


def step(state, batch, unused):
    scaled = helper(batch) + TABLE[:, None]
    loss = (state["w"] @ scaled).sum()
    return {"loss": loss, "state": {"w": state["w"] - 1.0}}


def programs(width=8):
    state = {"w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharded("x"))}
    batch = jax.ShapeDtypeStruct((8, width), "float32", sharding=sharded(None, "y"))
    unused = jax.ShapeDtypeStruct((3,), "int32", sharding=sharded())
    shardings = {"loss": sharded(), "state": {"w": sharded("x")}}
    arguments = (state, batch, unused)
    return {
        "step": Program(function=step, arguments=arguments, donate=(0,), out_shardings=shardings, ranks=range(4)),
    }
"""


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in the base, everywhere; then `more`; and what the network is asked for."""

    old: str = ""
    new: str = ""
    more: tuple[tuple[str, str], ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    platform: str = "cpu"

    def apply(self) -> str:
        source = BASE
        for old, new in ((self.old, self.new), *self.more) if self.old else ():
            assert old in source
            source = source.replace(old, new)
        return source


SAME = {
    "nothing": Edit(),
    "comment": Edit("def step", "# A comment,\n# and another.\ndef step"),
    "blank lines": Edit("import jax\n", "\n\n\n\nimport jax\n"),
    "docstring": Edit("    loss = (", '    """Say what it does."""\n    loss = ('),
    "local name": Edit("scaled", "the_scaled_batch"),
    "helper name": Edit("helper", "assistant"),
    "argument name": Edit("unused", "spare"),
    "function name": Edit("def step(", "def train(", (("function=step", "function=train"),)),
    "import": Edit("import numpy as np", "import math\nimport numpy as np"),
    "spelling of a constant": Edit("2.0", "(4.0 / 2)"),
    "default parameter given": Edit(parameters={"width": 8}),
    "jitted by hand": Edit(
        "function=step, arguments=arguments, donate=(0,), out_shardings=shardings",
        "function=jax.jit(step, donate_argnums=0, out_shardings=shardings), arguments=arguments",
    ),
    "traced by hand": Edit(
        "function=step, arguments=arguments, donate=(0,), out_shardings=shardings",
        "function=jax.jit(step, donate_argnums=0, out_shardings=shardings).trace(*arguments)",
    ),
    "lowered by hand": Edit(
        "function=step, arguments=arguments, donate=(0,), out_shardings=shardings",
        "function=jax.jit(step, donate_argnums=0, out_shardings=shardings).trace(*arguments)"
        ".lower(lowering_platforms=('cpu',))",
    ),
    "ranks": Edit("range(4)", "(7, 9)"),
    "pairs": Edit("    }\n", "    }.items()\n"),
    "unused value": Edit("((3,)", "((2 + 1,)"),
}

DIFFERENT = {
    "shape": Edit(parameters={"width": 16}),
    "dtype": Edit('width), "float32"', 'width), "bfloat16"'),
    "weak type": Edit('(8, 8), "float32", sharding', '(8, 8), "float32", weak_type=True, sharding'),
    "constant": Edit("2.0", "2.5"),
    "captured array": Edit("TABLE = np.arange(8", "TABLE = np.arange(1, 9"),
    "operation": Edit("- 1.0", "+ 1.0"),
    "matmul precision": Edit(
        '(state["w"] @ scaled)', 'jnp.matmul(state["w"], scaled, precision=jax.lax.Precision.HIGHEST)'
    ),
    "no donation": Edit("donate=(0,)", "donate=()"),
    "another donation": Edit("donate=(0,)", "donate=(0, 1)"),
    "argument sharding": Edit('sharded(None, "y")', 'sharded(None, "x")'),
    "argument without sharding": Edit(', sharding=sharded(None, "y")', ""),
    "memory kind": Edit(
        '"state": {"w": sharded("x")}', '"state": {"w": NamedSharding(MESH, P("x"), memory_kind="pinned_host")}'
    ),
    "result sharding": Edit('"state": {"w": sharded("x")}', '"state": {"w": sharded("y")}'),
    "result without sharding": Edit(", out_shardings=shardings", ""),
    "mesh axis name": Edit('"y"', '"z"'),
    "mesh axis sizes": Edit("(2, 2)", "(4, 1)"),
    "mesh size": Edit("(2, 2)", "(2, 4)"),
    "mesh axis type": Edit("(AxisType.Auto, AxisType.Auto)", "(AxisType.Auto, AxisType.Explicit)"),
    "argument key": Edit('state["w"]', 'state["v"]', (('state = {"w"', 'state = {"v"'),)),
    "result key": Edit('"loss":', '"cost":'),
    "argument tree": Edit("arguments = (state, batch, unused)", "arguments = (state, batch, [unused])"),
    "unused argument's shape": Edit("((3,)", "((4,)"),
    "kept argument": Edit(".sum()", ".sum() + unused.sum()"),
    "platform": Edit(platform="tpu"),
}


def run_parse(requests: dict[str, dict[str, Any]], hash_seed: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("JAX_PLATFORMS", None)
    process = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    found: dict[str, Any] = json.loads(process.stdout)
    return found


def request(folder: Path, entrypoint: str, platform: str = "cpu", **parameters: Any) -> dict[str, Any]:
    return {
        "network": "net",
        "folder": str(folder),
        "entrypoint": entrypoint,
        "parameters": parameters,
        "platform": platform,
    }


def written(folder: Path, name: str, source: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(source)
    return folder


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of each row, from one process; the original's is under ``original``, from another."""
    base = written(tmp_path_factory.mktemp("base"), "network.py", BASE)
    rows = tmp_path_factory.mktemp("rows")
    requests = {}
    for number, (row, edit) in enumerate({**SAME, **DIFFERENT}.items()):
        folder = written(rows / str(number), f"network_{number}.py", edit.apply())
        requests[row] = request(folder, f"network_{number}.py:programs", edit.platform, **edit.parameters)
    results = run_parse(requests, hash_seed=2)
    results["original"] = run_parse({"original": request(base, "network.py:programs")}, hash_seed=1)["original"]
    return results


def digest_of(result: dict[str, Any]) -> str:
    assert "step" in result, result
    digest: str = result["step"][0]
    return digest


@pytest.mark.parametrize("row", SAME)
def test_payload_must_not_change(parsed: dict[str, Any], row: str) -> None:
    assert digest_of(parsed[row]) == digest_of(parsed["original"])


@pytest.mark.parametrize("row", DIFFERENT)
def test_payload_must_change(parsed: dict[str, Any], row: str) -> None:
    assert digest_of(parsed[row]) != digest_of(parsed["original"])


def test_no_two_edits_give_one_payload(parsed: dict[str, Any]) -> None:
    digests = [digest_of(parsed[row]) for row in DIFFERENT]
    assert len(set(digests)) == len(digests)


def test_ranks_are_those_of_the_program(parsed: dict[str, Any]) -> None:
    assert parsed["original"]["step"][1] == "0-3"
    assert parsed["ranks"]["step"][1] == "7,9"


HEAD = """
import sys
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from graphkiln.tasks.contracts import Program
X = jax.ShapeDtypeStruct((4, 8), "float32")
def double(x):
    return x * 2
"""


def one(program: str, name: str = "'p'") -> str:
    return f"{HEAD}def programs():\n    return {{{name}: {program}}}\n"


# source, reason, fragments of the message; line 11 is the first line of `programs`
ERRORS: dict[str, tuple[str, str, list[str]]] = {
    "syntax": ("def programs(:\n", "network-raised", ["SyntaxError: invalid syntax (network.py:1)"]),
    "raises on import": ("x = 1\nraise OSError('no disk')\n", "network-raised", ["OSError: no disk", "(network.py:2)"]),
    "exits on import": ("import sys\nsys.exit(3)\n", "network-raised", ["SystemExit: 3", "(network.py:2)"]),
    "missing import": ("import no_such_thing\n", "network-raised", ["ModuleNotFoundError", "(network.py:1)"]),
    "no attribute": ("x = 1\n", "no-such-attribute", ["network.py has no programs"]),
    "not callable": ("programs = {}\n", "entrypoint-not-callable", ["programs is of type dict"]),
    "raises": (f"{HEAD}def programs():\n    raise KeyError('w')\n", "network-raised", ["KeyError: 'w'", ".py:11)"]),
    "raises in a sibling": (
        f"import beside\n{HEAD}def programs():\n    return beside.broken()\n",
        "network-raised",
        ["ZeroDivisionError", "(beside.py:2)"],
    ),
    "exits": (f"{HEAD}def programs():\n    sys.exit('stop')\n", "network-raised", ["SystemExit: stop", ".py:11)"]),
    "missing parameter": ("def programs(width): ...\n", "bad-parameters", ["'width'", "it takes: width"]),
    "returns nothing": ("def programs(): ...\n", "not-a-mapping", ["returned NoneType"]),
    "returns text": ("def programs(): return 'p'\n", "not-a-mapping", ["returned str"]),
    "returns a list": ("def programs(): return [1]\n", "not-a-mapping", ["returned list"]),
    "generator raises": ("def programs():\n    yield 1 / 0\n", "network-raised", ["ZeroDivision", "(network.py:2)"]),
    "empty": ("def programs(): return {}\n", "no-programs", ["no programs"]),
    "value is no program": ("def programs(): return {'p': 1}\n", "not-a-program", ["returned p as int"]),
    "bad name": (one("Program(function=double, arguments=(X,))", "'a b'"), "bad-name", ["'a b'"]),
    "name is no text": (one("Program(function=double, arguments=(X,))", "3"), "bad-name", ["3"]),
    "duplicate name": (
        f"{HEAD}def programs():\n    yield from 2 * [('p', Program(function=double, arguments=(X,)))]\n",
        "duplicate-program",
        ["two programs named p"],
    ),
    "negative rank": (one("Program(function=double, arguments=(X,), ranks=(-1,))"), "bad-ranks", ["p", "-1"]),
    "no ranks": (one("Program(function=double, arguments=(X,), ranks=())"), "bad-ranks", ["no rank runs it"]),
    "ranks are no ranks": (one("Program(function=double, arguments=(X,), ranks=3)"), "bad-ranks", ["p"]),
    "function is no function": (one("Program(function=3)"), "bad-program", ["program p", "of type int"]),
    "arguments are no tuple": (one("Program(function=double, arguments=[X])"), "bad-program", ["of type list"]),
    "donates too much": (one("Program(function=double, arguments=(X,), donate=(1,))"), "bad-program", ["argument 1"]),
    "donate is a number": (one("Program(function=double, arguments=(X,), donate=0)"), "bad-program", ["donate is 0"]),
    "donates jitted": (
        one("Program(function=jax.jit(double), arguments=(X,), donate=(0,))"),
        "bad-program",
        ["jitted already", "jax.jit"],
    ),
    "traced with arguments": (
        one("Program(function=jax.jit(double).trace(X), arguments=(X,))"),
        "bad-program",
        ["traced already"],
    ),
    "does not trace": (
        one("Program(function=lambda x: double(x) @ x, arguments=(X,))"),
        "network-raised",
        ["program p", "TypeError", "(network.py:11)"],
    ),
    "wrong number of arguments": (one("Program(function=double)"), "network-raised", ["program p", "TypeError"]),
    "debug print": (
        one("Program(function=lambda x: (jax.debug.print('{}', x), x)[1], arguments=(X,))"),
        "bad-program",
        ["program p", "side effects"],
    ),
    "pure callback": (
        one("Program(function=lambda x: jax.pure_callback(double, X, x), arguments=(X,))"),
        "network-raised",
        ["program p", "callbacks"],
    ),
    "own compiler options": (
        one("Program(function=jax.jit(double, compiler_options={'xla_cpu_max_isa': 'AVX2'}), arguments=(X,))"),
        "bad-program",
        ["compiler_options"],
    ),
    "lowered for another platform": (
        one("Program(function=jax.jit(double).trace(X).lower(lowering_platforms=('tpu',)))"),
        "bad-program",
        ["program p", "lowered for tpu", "wants cpu"],
    ),
    "own pytree node": (
        f"""{HEAD}
import functools
@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=[])
class Box:
    def __init__(self, x): self.x = x
def programs():
    return {{"p": Program(function=Box, arguments=(X,))}}
""",
        "unsupported-type",
        ["program p", "Box", "named tuples instead"],
    ),
    "local named tuple": (
        f"""{HEAD}
from typing import NamedTuple
def programs():
    class State(NamedTuple):
        x: object
    return {{"p": Program(function=State, arguments=(X,))}}
""",
        "unsupported-type",
        ["program p", "State", "cannot be imported"],
    ),
    "dict key": (
        one("Program(function=lambda x: {1.5: x}, arguments=(X,))"),
        "unsupported-type",
        ["program p", "1.5"],
    ),
    "own layout": (
        f"""{HEAD}
from jax.experimental.layout import Format, Layout
def programs():
    layout = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return {{"p": Program(function=double, arguments=(X,), out_shardings=layout)}}
""",
        "bad-program",
        ["program p", "default layouts"],
    ),
}

# entrypoint, platform, parameters, reason, fragments
BAD_REQUESTS: dict[str, tuple[str, str, dict[str, Any], str, list[str]]] = {
    "no file": ("missing.py:programs", "cpu", {}, "no-such-file", ["missing.py"]),
    "no module": ("no_such_package.net:programs", "cpu", {}, "no-such-module", ["no_such_package.net"]),
    "no colon": ("network.py", "cpu", {}, "bad-entrypoint", ["file.py:callable"]),
    "no callable": ("network.py:", "cpu", {}, "bad-entrypoint", ["file.py:callable"]),
    "unknown parameter": ("network.py:programs", "cpu", {"widht": 1}, "bad-parameters", ["'widht'", "it takes: width"]),
    "unknown platform": ("network.py:programs", "", {}, "unknown-platform", ["cpu or tpu"]),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rows = tmp_path_factory.mktemp("errors")
    requests = {}
    for number, (row, (source, _, _)) in enumerate(ERRORS.items()):
        folder = written(rows / str(number), "network.py", source)
        written(folder, "beside.py", "def broken():\n    return 1 / 0\n")
        requests[row] = request(folder, "network.py:programs")
    base = written(rows / "base", "network.py", BASE)
    for row, (entrypoint, platform, parameters, _, _) in BAD_REQUESTS.items():
        requests[row] = request(base, entrypoint, platform, **parameters)
    return run_parse(requests, hash_seed=3)


@pytest.mark.parametrize("row", [*ERRORS, *BAD_REQUESTS])
def test_bad_input_is_one_clear_line(refused: dict[str, Any], row: str) -> None:
    *_, reason, fragments = ERRORS[row] if row in ERRORS else BAD_REQUESTS[row]
    assert refused[row].get("reason") == reason, refused[row]
    message = refused[row]["message"]
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_networks_may_be_written_in_many_ways(tmp_path: Path) -> None:
    source = f"""
from __future__ import annotations
from dataclasses import dataclass
from typing import NamedTuple
{HEAD}
import layers
class State(NamedTuple):
    w: jax.Array
    count: int | None
@dataclass
class Config:
    width: int = 8
def programs(**parameters):
    config = Config(**parameters)
    x = jax.ShapeDtypeStruct((config.width,), "float32")
    yield "named-tuple", Program(function=lambda s: layers.grow(s.w), arguments=(State(x, None),), ranks=[3, 1, 2])
    key = jax.eval_shape(lambda: jax.random.key(0))
    yield "key", Program(function=lambda k: jax.random.normal(k, (2,)), arguments=(key,))
"""
    written(tmp_path / "package", "network_of_many_ways.py", source)
    written(tmp_path / "package", "layers.py", "def grow(x):\n    return x + 1\n")
    written(tmp_path / "package", "__init__.py", "")
    written(tmp_path / "module", "module_network.py", BASE)
    results = run_parse(
        {
            "file": request(tmp_path, "package/network_of_many_ways.py:programs", width=4),
            "absolute": request(tmp_path, f"{tmp_path}/package/network_of_many_ways.py:programs", width=4),
            "module": request(tmp_path / "module", "module_network:programs"),
        },
        hash_seed=4,
    )
    assert results["file"]["named-tuple"][1] == "1-3"
    assert set(results["file"]) == {"named-tuple", "key"}
    assert results["absolute"] == results["file"]
    assert set(results["module"]) == {"step"}


def test_fingerprint_imports_no_jax() -> None:
    script = """
import sys
from graphkiln.tasks.frontends.jax import JaxFrontend
names = [part.name for part in JaxFrontend().fingerprint()]
assert "jax" not in sys.modules
print(*names)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {"jax.version", "jaxlib.version", "jaxlib.record"} <= set(found)
