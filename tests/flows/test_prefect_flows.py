"""The flows on a real Prefect server, and what its API says of them afterwards."""

import functools
import json
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from graphkiln.storage.locations import open_filesystem
from graphkiln.storage.store import open_store
from tests.flows.prefect_api import Server
from tests.storage.catalogs import rows_in
from tests.storage.faulty_proxy import REFUSED, FaultyProxy
from tests.storage.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY, options_for

pytestmark = [pytest.mark.prefect, pytest.mark.xdist_group("prefect")]

BROKEN = "int run(int a) { return a +; }\n"


class Network:
    """A spec with C kernels below a folder, a store, and a log of the compilers that ran."""

    def __init__(self, folder: Path, server: Server, *, store: Path | None = None) -> None:
        self.name = f"net-{uuid.uuid4().hex[:8]}"
        self.folder = folder / self.name
        self.server = server
        self.store = store or folder / "store"
        self.compiled = folder / "compiled"
        self.spec = self.folder / "spec.toml"
        (self.folder / "kernels").mkdir(parents=True)

    def write(self, kernels: Mapping[str, str], *, targets: Sequence[str] = ("-O1",)) -> "Network":
        for name, text in kernels.items():
            (self.folder / "kernels" / f"{name}.c").write_text(text)
        script = f'echo ran >> {self.compiled}; exec cc -shared -fPIC "$2" "$0" -o "$1"'
        lines = ["[network]", f'name = "{self.name}"', 'frontend = "file"', 'entrypoint = "kernels/*.c"']
        lines += ["[parameters.ranks]", *(f'{name} = "{rank}"' for rank, name in enumerate(kernels))]
        for option in targets:
            argv = ["sh", "-c", script, "{input}", "{output}", option]
            lines += [f"[targets.opt{option[-1]}]", 'backend = "command"', f"argv = {json.dumps(argv)}"]
            lines += ["version_argv = []", 'tools = ["cc"]']
        self.spec.write_text("\n".join(lines))
        return self

    def compile(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = ["-m", "graphkiln", "compile", str(self.spec), "--store", str(self.store), *arguments]
        return run(command, self.server.environment)

    def states(self, *arguments: str) -> tuple[int, dict[str, str]]:
        done = self.compile("--json", *arguments)
        return done.returncode, {graph["name"]: graph["state"] for graph in json.loads(done.stdout)["graphs"]}

    def blobs(self) -> dict[str, Path]:
        """Kernel graph -> the file in the store that holds its artifact."""
        found: dict[str, Path] = {}
        (ref,) = [path for path in (self.store / "refs" / self.name).rglob("*") if path.is_file()]
        manifest = json.loads(ref.read_bytes())["body"]["manifest"]
        (document,) = (self.store / "manifests").glob(f"*/{manifest}")
        for name, outputs in json.loads(document.read_bytes())["body"]["artifacts"].items():
            (output,) = outputs.values()
            found[name] = next((self.store / "blobs").glob(f"*/{output['digest']}"))
        return found


def run(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env={**clean, **environment}
    )


def run_python(code: str, server: Server, **values: object) -> Any:
    """Run code in a process of its own, as a worker of Prefect would, and return what it leaves in `result`."""
    head = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    tail = "import json\nprint(json.dumps(result))"
    done = run(["-c", "\n".join([head, textwrap.dedent(code), tail])], server.environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def kernel(constant: int) -> str:
    return f"int run(int a) {{ return a + {constant}; }}\n"


def test_the_server_sees_each_kernel_graph_and_the_store_decides(tmp_path: Path, server: Server) -> None:
    network = Network(tmp_path, server).write({"add": kernel(1), "plus": kernel(1), "double": kernel(2)})
    title = f"{network.name} for opt1 (variant "
    tasks = {"compile add", "compile double"}  # `plus` is the same kernel graph as `add`

    assert network.states() == (0, dict.fromkeys(["add", "double", "plus"], "compiled"))
    first = server.flow_run(network.name)
    assert first["name"].startswith(title)
    assert first["state_name"] == "Completed"
    assert first["parameters"]["target"] == "opt1"
    states = server.task_runs(first, 4)
    assert {name: states[name] for name in tasks} == dict.fromkeys(tasks, "Completed")
    assert {name.split(" (")[0] for name in states.keys() - tasks} == {
        f"parse {network.name} for opt1",
        f"commit {network.name} for opt1",
    }
    artifact = server.artifact(first, "table")
    rows = json.loads(artifact["data"])
    assert "3 compiled; committed manifest" in artifact["description"]
    assert [(row["kernel graph"], row["ranks"], row["state"], row["reason"]) for row in rows] == [
        ("add", "0", "compiled", ""),
        ("double", "2", "compiled", ""),
        ("plus", "1", "compiled", ""),
    ]
    assert all(row["seconds"] > 0 and row["bytes"] > 1000 for row in rows)

    # With a server configured the flow runs even if there is nothing to do.
    assert network.states() == (0, dict.fromkeys(["add", "double", "plus"], "cached"))
    second = server.flow_run(network.name)
    assert second["id"] != first["id"]
    states = server.task_runs(second, 4)
    assert {name: states[name] for name in tasks} == dict.fromkeys(tasks, "Cached")

    # Prefect has both as completed. What is in the store decides.
    blobs = network.blobs()
    blobs["double"].chmod(0o600)
    content = bytearray(blobs["double"].read_bytes())
    content[len(content) // 2] ^= 1
    blobs["double"].write_bytes(content)
    assert network.states() == (0, {"add": "cached", "double": "compiled", "plus": "cached"})
    states = server.task_runs(server.flow_run(network.name), 4)
    assert {name: states[name] for name in tasks} == {"compile add": "Cached", "compile double": "Completed"}

    network.blobs()["add"].unlink()
    assert network.states() == (0, {"add": "compiled", "double": "cached", "plus": "compiled"})
    states = server.task_runs(server.flow_run(network.name), 4)
    assert {name: states[name] for name in tasks} == {"compile add": "Completed", "compile double": "Cached"}

    assert not server.results.exists() or not list(server.results.iterdir())


def test_a_failing_kernel_graph_fails_the_run_and_stops_no_other(tmp_path: Path, server: Server) -> None:
    network = Network(tmp_path, server).write(
        {"bad": BROKEN, "good": kernel(1), "late": kernel(2), "worse": "int f( {"}
    )
    done = network.compile()
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr

    flow_run = server.flow_run(network.name)
    message = flow_run["state"]["message"]
    assert flow_run["state_name"] == "Failed"
    assert "2 of 4 kernel graphs did not compile, nothing was committed" in message
    assert "bad: command: compiler-error: " in message
    assert "worse: command: compiler-error: " in message
    assert "error: expected expression before" in message
    assert "good" not in message
    states = server.task_runs(flow_run, 5)
    assert not [name for name in states if name.startswith("commit")]
    assert {name: state for name, state in states.items() if not name.startswith("parse")} == {
        "compile bad": "Failed",
        "compile good": "Completed",
        "compile late": "Completed",
        "compile worse": "Failed",
    }
    log = server.log_of("compile bad", "the end of the compiler's log of bad")
    assert "return a +;" in log  # the compiler's own lines
    rows = {row["kernel graph"]: row for row in json.loads(server.artifact(flow_run, "table")["data"])}
    assert (rows["bad"]["state"], rows["bad"]["reason"]) == ("failed", "compiler-error")
    assert (rows["good"]["state"], rows["good"]["reason"]) == ("compiled", "")
    assert not (network.store / "refs").exists() or not list((network.store / "refs").rglob("*"))

    # The fixed network compiles what is missing, and only it.
    network.write({"bad": kernel(3), "good": kernel(1), "late": kernel(2), "worse": kernel(4)})
    assert network.states() == (0, {"bad": "compiled", "good": "cached", "late": "cached", "worse": "compiled"})


def test_some_ranks_of_a_network(tmp_path: Path, server: Server) -> None:
    network = Network(tmp_path, server).write({"a": kernel(1), "b": kernel(2), "c": kernel(3)})
    code, states = network.states("--ranks", "1")
    assert (code, states) == (5, {"b": "compiled"})
    flow_run = server.flow_run(network.name)
    assert flow_run["state_name"] == "Completed"
    assert flow_run["parameters"]["ranks"] == "1"
    states = server.task_runs(flow_run, 3)
    assert states["compile b"] == "Completed"
    assert [state for name, state in states.items() if name.startswith("commit")] == ["NotCommitted"]


def test_the_flow_as_a_deployment_calls_it(tmp_path: Path, server: Server) -> None:
    network = Network(tmp_path, server).write({"a": kernel(1), "b": kernel(2)}, targets=["-O1", "-O2"])
    found = run_python(
        """
        from graphkiln.flows.compile_network import compile_network

        def attempt(**parameters):
            try:
                report = compile_network(store=store, **parameters)
            except Exception as error:
                return [type(error).__name__, str(error)]
            return [report.summary().split(";")[0], report.target]

        result = [
            attempt(spec=spec, target="opt2", jobs=1),
            attempt(spec=spec, target="opt2", ranks="0"),
            attempt(spec=spec + ".missing"),
            attempt(spec=spec, target="opt3"),
            attempt(spec=spec, parameters={"rank": 1}),
            attempt(spec=spec, ranks="one"),
        ]
        """,
        server,
        spec=str(network.spec),
        store=str(network.store),
    )
    assert found[0] == ["2 compiled", "opt2"]
    assert found[1] == ["1 cached", "opt2"]
    assert {kind for kind, _ in found[2:]} == {"BadInputError"}
    assert "there is no spec" in found[2][1]
    assert "'opt3'" in found[3][1]
    assert "did you mean 'ranks'" in found[4][1]
    assert "'one' is not a list of ranks" in found[5][1]
    flow_run = server.flow_run(network.name)
    assert (flow_run["state_name"], flow_run["state"]["message"]) == ("Failed", found[5][1])


PRECOMPILE = """
from graphkiln.flows.precompile import PrecompileRequest, precompile

def attempt(*requests, **parameters):
    try:
        precompile([PrecompileRequest(**request) for request in requests], store=store, **parameters)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []
"""


def test_precompile_compiles_shared_kernel_graphs_once(tmp_path: Path, server: Server) -> None:
    shared = {"a": kernel(1), "b": kernel(2)}
    first = Network(tmp_path, server).write({**shared, "c": kernel(3)}, targets=["-O1", "-O2"])
    second = Network(tmp_path, server).write({"x": kernel(1), "y": kernel(2)}, targets=["-O1", "-O2"])
    requests = [{"spec": str(first.spec)}, {"spec": str(second.spec), "targets": ["opt1"]}]
    code = PRECOMPILE + "result = attempt(*requests, jobs=2)"
    assert run_python(code, server, requests=requests, store=str(first.store)) == []

    assert first.compiled.read_text().split() == ["ran"] * 6  # a, b, c for two targets
    flow_run = server.flow_run(first.name)
    assert flow_run["state_name"] == "Completed"
    states = server.task_runs(flow_run, 3 + 6 + 3)
    assert set(states.values()) == {"Completed"}
    refs = {path.parts[-3:-1] for path in (first.store / "refs").rglob("*") if path.is_file()}
    assert refs == {(first.name, "opt1"), (first.name, "opt2"), (second.name, "opt1")}
    artifact = server.artifact(flow_run, "markdown")
    assert [row.count("committed manifest") for row in artifact["data"].splitlines()] == [0, 0, 1, 1, 1]
    # Each network has its rows in the catalogue, and what they share was compiled once.
    rows = rows_in(open_store(str(first.store)))
    wanted = [(first.name, target, graph) for target in ("opt1", "opt2") for graph in "abc"]
    wanted += [(second.name, "opt1", graph) for graph in "xy"]
    assert sorted((row["network"], row["target"], row["kernel_graph"]) for row in rows) == sorted(wanted)
    assert {row["outcome"] for row in rows} == {"compiled"}
    assert len({row["run"] for row in rows}) == 3
    assert len({(row["action_key"], row["compiled_at"]) for row in rows}) == 6


def test_precompile_goes_on_past_networks_that_fail(tmp_path: Path, server: Server) -> None:
    good = Network(tmp_path, server).write({"a": kernel(1), "b": kernel(2)})
    bad = Network(tmp_path, server).write({"a": kernel(1), "broken": BROKEN, "c": kernel(3)})
    same = Network(tmp_path, server).write({"broken-too": BROKEN})
    empty = Network(tmp_path, server).write({})
    specs = [str(tmp_path / "missing.toml"), *(str(network.spec) for network in (bad, same, empty, good))]
    requests: list[dict[str, object]] = [{"spec": spec} for spec in specs]
    requests.append({"spec": str(good.spec), "targets": ["opt7"]})
    requests.append({"spec": str(good.spec), "parameters": {"rank": "0"}})
    kind, message = run_python(
        PRECOMPILE + "result = attempt(*requests)", server, requests=requests, store=str(good.store)
    )
    assert kind == "CompileFailedError"
    head, *lines = message.splitlines()
    assert head == "6 of 7 networks failed"
    told = ["there is no spec", "'rank'", "'opt7'", bad.name, same.name, empty.name]
    assert all(sum(text in line for line in lines) >= 1 for text in told), message
    assert [line for line in lines if line.startswith(f"  {bad.name}") and "1 of 3 kernel graphs" in line]
    assert good.compiled.read_text().split() == ["ran"] * 4  # a, b, c and once the broken one
    flow_run = server.flow_run(good.name)
    assert (flow_run["state_name"], flow_run["state"]["message"]) == ("Failed", message)
    states = server.task_runs(flow_run, 4 + 4 + 1)
    assert sorted(states.values()) == ["Completed"] * 7 + ["Failed"] * 2  # the empty network's parse, the broken graph
    assert "NotReady" not in states.values()
    refs = {path.parts[-3] for path in (good.store / "refs").rglob("*") if path.is_file()}
    assert refs == {good.name}
    rows = server.artifact(flow_run, "markdown")["data"].splitlines()[2:]
    assert len(rows) == 7
    assert sum("committed manifest" in row for row in rows) == 1
    failed = [row for row in rows_in(open_store(str(good.store))) if row["outcome"] == "failed"]
    assert {row["network"] for row in failed} == {bad.name, same.name}
    assert len({(row["action_key"], row["compiled_at"]) for row in failed}) == 1


def test_a_bug_or_a_store_that_fails_is_no_failed_compile(tmp_path: Path, server: Server) -> None:
    one = Network(tmp_path, server).write({"a": kernel(1), "b": kernel(2)})
    two = Network(tmp_path, server).write({"c": kernel(3)})
    found = run_python(
        PRECOMPILE
        + """
import graphkiln.tasks.session
from graphkiln.flows.compile_network import compile_network
from graphkiln.storage.errors import StoreUnavailableError

session = graphkiln.tasks.session.CompileSession
real = session._look_up

def raise_for(graph_name, error):
    def lookup(self, graph):
        if graph.name == graph_name:
            raise error
        return real(self, graph)
    session._look_up = lookup

def compile_one():
    try:
        compile_network(requests[0]["spec"], store=store)
    except Exception as error:
        return [type(error).__name__, str(error)]

raise_for("a", StoreUnavailableError("the disk is full", reason="disk-full"))
result = [compile_one()]
raise_for("a", KeyError("a bug"))
result += [compile_one(), attempt(*requests)]
""",
        server,
        requests=[{"spec": str(one.spec)}, {"spec": str(two.spec)}],
        store=str(one.store),
    )
    assert found[0] == ["StoreUnavailableError", "the disk is full"]
    assert found[1] == ["KeyError", "'a bug'"]
    assert found[2][0] == "CompileFailedError"
    assert "a bug in graphkiln: KeyError('a bug')" in found[2][1]
    assert [path.parts[-3] for path in (one.store / "refs").rglob("*") if path.is_file()] == [two.name]


def test_ensure_runs_the_flow_if_a_server_is_configured(tmp_path: Path, server: Server) -> None:
    network = Network(tmp_path, server).write({"a": kernel(1)})
    code = """
    import graphkiln
    result = graphkiln.ensure(spec, store=store).graphs()
    """
    assert run_python(code, server, spec=str(network.spec), store=str(network.store)) == ["a"]
    assert server.flow_run(network.name)["state_name"] == "Completed"


def test_a_collection_shows_what_it_freed(tmp_path: Path, server: Server) -> None:
    network = Network(tmp_path, server).write({"a": kernel(1), "b": kernel(2)})
    assert network.compile("--no-prefect").returncode == 0
    code = """
    from graphkiln.flows.collect import collect
    found = collect(store=store, max_size="0", grace="0s")
    try:
        collect(store=store, grace="soon")
    except Exception as error:
        told = [type(error).__name__, str(error)]
    result = [found.freed_bytes, [item.network for item in found.freed], told]
    """
    freed, networks, told = run_python(code, server, store=str(network.store))
    assert networks == [network.name]
    assert told == ["BadInputError", "'soon' is no duration of at most a century: write 30d, 12h, 90m, 2w or 45s"]
    assert not list((network.store / "blobs").glob("*/*"))
    done, failed = (
        run
        for state in ("COMPLETED", "FAILED")
        for run in server.filter("flow_runs", flow_runs={"state": {"type": {"any_": [state]}}})
        if run["parameters"].get("store") == str(network.store) and "grace" in run["parameters"]
    )
    assert failed["state_name"] == "Failed"
    (row,) = json.loads(server.artifact(done, "table")["data"])
    assert (row["network"], row["bytes"]) == (network.name, freed)


def test_a_url_that_leads_elsewhere(tmp_path: Path, server: Server) -> None:
    network = Network(tmp_path, server).write({"a": kernel(1)})
    elsewhere = Server(server.url.replace("/api", "/elsewhere"), server.home)
    network.server = elsewhere
    done = network.compile()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Prefect's server cannot be used: ")


@pytest.mark.s3
@pytest.mark.parametrize("way", ["URL", "option", "environment"])
def test_no_credential_is_shown_or_stored_anywhere(tmp_path: Path, server: Server, s3_endpoint: str, way: str) -> None:
    """Not even if a server repeats it in its answers."""
    network = Network(tmp_path, server).write({"a": kernel(1), "b": kernel(2)})
    with FaultyProxy(s3_endpoint).running() as proxy:
        environment = {**server.environment, "AWS_ENDPOINT_URL": proxy.url, "PREFECT_LOGGING_LEVEL": "DEBUG"}
        given = f"{ACCESS_KEY}:{SECRET_KEY}@" if way == "URL" else ""
        store = f"s3://{given}{BUCKET}/{network.name}"
        command = ["-m", "graphkiln", "compile", str(network.spec), "--store", store]
        if way == "option":
            command += ["--storage-option", f"key={ACCESS_KEY}", "--storage-option", f"secret={SECRET_KEY}"]
        if way == "environment":
            environment |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        # In the middle of the flow; and once, before it starts, and not at all.
        refusals = {"/actions/": 3} if way != "URL" else {"/.tmp-probe": 2, "/actions/": 3, "/nowhere": 0}
        for folder, code in refusals.items():
            proxy.fault = functools.partial(_refuse, folder, f"{REFUSED}the secret {SECRET_KEY} is not welcome")
            done = run(command, environment)
            assert done.returncode == code, done.stderr
            shown = done.stdout + done.stderr
            assert SECRET_KEY not in shown
            assert ("is not welcome" in shown) is (code != 0)
            assert f"s3://{BUCKET}/{network.name}" in shown
    assert server.flow_run(network.name)["parameters"]["store"] == f"s3://{BUCKET}/{network.name}"
    filesystem = open_filesystem(f"s3://{BUCKET}/{network.name}", options_for(s3_endpoint))
    stored = [data for data in filesystem.read_many(list(filesystem.names(""))) if isinstance(data, bytes)]
    kept = [path.read_bytes() for path in server.home.rglob("*") if path.is_file()]
    for text, places in ((network.name, [b"".join(stored), b"".join(kept)]), ("is not welcome", [b"".join(kept)])):
        assert all(text.encode() in place for place in places)
    assert not any(SECRET_KEY.encode() in data for data in (*stored, *kept))


def _refuse(folder: str, answer: str, method: str, path: str) -> str | None:
    return answer if folder in path and method == "PUT" else None


def test_the_flows_describe_their_parameters() -> None:
    code = """
    from prefect.utilities.callables import parameter_schema
    from graphkiln.flows.collect import collect
    from graphkiln.flows.compile_network import compile_network
    from graphkiln.flows.precompile import precompile
    result = [parameter_schema(flow).model_dump() for flow in (compile_network, precompile, collect)]
    """
    done = run(["-c", textwrap.dedent(code) + "import json\nprint(json.dumps(result))"], {})
    one, many, collection = json.loads(done.stdout)
    assert set(one["properties"]) == {"spec", "target", "parameters", "ranks", "store", "jobs"}
    assert one["required"] == ["spec"]
    assert set(many["properties"]) == {"networks", "store", "jobs"}
    assert set(collection["properties"]) == {"store", "keep_last", "older_than", "max_size", "grace", "dry_run"}
    assert all(item["description"] for flow in (one, many, collection) for item in flow["properties"].values())
    request = many["definitions"]["PrecompileRequest"]["properties"]
    assert all(request[name]["description"] for name in ("spec", "targets", "parameters"))
    assert one["definitions"]["TargetSpec"]["properties"]["backend"]["description"]
