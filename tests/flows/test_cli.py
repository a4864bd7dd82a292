"""The command line, run as users run it: as a process, with a real C compiler."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SPEC = """
[network]
name = "kernels"
frontend = "file"
entrypoint = "kernels/*.c"

[parameters]
ranks = { add = "0-15", double = "0-31", negate = "32-63" }

[targets.native]
backend = "command"
argv = ["cc", "-O1", "-shared", "-fPIC", "{input}", "-o", "{output}"]

[targets.fast]
backend = "command"
argv = ["cc", "-O3", "-shared", "-fPIC", "{input}", "-o", "{output}"]
"""
KERNELS = {
    "add": "int run(int a, int b) { return a + b; }\n",
    "double": "int run(int a) { return a + a; }\n",
    "negate": "int run(int a) { return -a; }\n",
}
BROKEN = "int run(int a) { return a +; }\n"


class Project:
    """A folder with a spec and its kernels, a store, and the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = folder / "kernels.toml"
        self.store = folder / "store"
        self.spec.write_text(SPEC)
        (folder / "kernels").mkdir()
        for name, text in KERNELS.items():
            self.write(name, text)

    def write(self, kernel: str, text: str) -> None:
        (self.folder / "kernels" / f"{kernel}.c").write_text(text)

    def run(
        self, *arguments: str | Path, environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
        return subprocess.run(
            [sys.executable, "-m", "graphkiln", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**clean, "GRAPHKILN_STORE": str(self.store), "PREFECT_HOME": str(self.folder), **(environment or {})},
            timeout=120,
        )

    def compile(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run("compile", self.spec, "--no-prefect", *arguments)

    def compile_json(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        done = self.compile("--json", *arguments)
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def states(report: Mapping[str, Any]) -> dict[str, str]:
    return {graph["name"]: graph["state"] for graph in report["graphs"]}


def test_first_compile_commits_and_second_finds_everything_cached(project: Project) -> None:
    code, first = project.compile_json()
    assert code == 0
    assert first["committed"] is True
    assert states(first) == {"add": "compiled", "double": "compiled", "negate": "compiled"}
    code, second = project.compile_json()
    assert code == 0
    assert states(second) == {"add": "cached", "double": "cached", "negate": "cached"}
    assert second["manifest"] == first["manifest"]


def test_failed_kernel_graph_blocks_the_commit_and_only_it_is_compiled_again(project: Project) -> None:
    project.write("double", BROKEN)
    code, failed = project.compile_json()
    assert code == 3
    assert failed["committed"] is False
    assert failed["manifest"] is None
    assert states(failed) == {"add": "compiled", "double": "failed", "negate": "compiled"}
    failure = next(graph for graph in failed["graphs"] if graph["name"] == "double")
    assert failure["reason"] == "compiler-error"
    assert "expected expression" in failure["message"]
    assert not list((project.store / "refs").rglob("*"))

    code, again = project.compile_json()
    assert code == 3
    assert states(again) == {"add": "cached", "double": "failed", "negate": "cached"}

    project.write("double", KERNELS["double"])
    code, fixed = project.compile_json()
    assert code == 0
    assert states(fixed) == {"add": "cached", "double": "compiled", "negate": "cached"}


def test_failure_is_told_with_graph_backend_reason_message_and_where_the_log_is(project: Project) -> None:
    project.write("double", BROKEN)
    told = project.compile().stdout
    assert "double failed in command: compiler-error" in told
    assert "expected expression" in told
    assert "graphkiln log kernels double --target native" in told
    log = project.run("log", "kernels", "double", "--target", "native")
    assert log.returncode == 0
    assert "expected expression" in log.stdout
    assert "Traceback" not in log.stdout


def test_ranks_compile_their_own_kernel_graphs_and_commit_once_nothing_is_missing(project: Project) -> None:
    code, some = project.compile_json("--ranks", "13")
    assert code == 5
    assert states(some) == {"add": "compiled", "double": "compiled"}
    assert some["committed"] is False
    assert some["missing"] == ["negate"]
    code, rest = project.compile_json("--ranks", "32-33,63")
    assert code == 0
    assert states(rest) == {"negate": "compiled"}
    assert rest["committed"] is True


def test_targets_live_side_by_side(project: Project) -> None:
    assert project.compile_json()[0] == 0
    code, fast = project.compile_json("--target", "fast")
    assert code == 0
    assert set(states(fast).values()) == {"compiled"}
    status = json.loads(project.run("status", "--json").stdout)
    assert {(item["target"], item["state"]) for item in status["variants"]} == {
        ("native", "committed"),
        ("fast", "committed"),
    }


def test_equal_kernel_graphs_are_compiled_once(project: Project) -> None:
    project.write("negate", KERNELS["double"])
    code, report = project.compile_json()
    assert code == 0
    keys = {graph["name"]: graph["key"] for graph in report["graphs"]}
    assert keys["negate"] == keys["double"] != keys["add"]
    assert len(list((project.store / "actions").rglob("*/*"))) == 2


def test_status_and_show_tell_an_outdated_variant_from_a_committed_one(project: Project) -> None:
    assert project.run("status").stdout.startswith("the store")
    project.compile()
    assert "committed" in project.run("status", "kernels").stdout
    project.write("add", BROKEN)
    project.compile()
    shown = json.loads(project.run("show", "kernels", "--json").stdout)["variants"][0]
    assert shown["state"] == "outdated"
    assert {graph["name"]: graph["state"] for graph in shown["graphs"]} == {
        "add": "failed",
        "double": "compiled",
        "negate": "compiled",
    }
    assert project.run("show", project.spec).stdout.count("compiler-error") == 1


def test_explain_names_the_key_part_that_changed(project: Project) -> None:
    project.compile()
    assert "first plan" in project.run("explain", "kernels").stdout
    project.write("add", "int run(int a, int b) { return b + a + 0 * a; }\n")
    project.compile()
    found = json.loads(project.run("explain", "kernels", "--json").stdout)
    changed = {graph["name"]: [change["name"] for change in graph["changes"]] for graph in found["graphs"]}
    assert changed == {"add": ["payload"], "double": [], "negate": []}
    assert "add: compiled; key changed: payload" in project.run("explain", project.spec).stdout


def test_verify_reports_damage_with_its_own_exit_code(project: Project) -> None:
    project.compile()
    assert project.run("verify").returncode == 0
    victim = next(path for path in (project.store / "blobs").rglob("*") if path.is_file())
    victim.write_bytes(victim.read_bytes()[:-1])
    told = project.run("verify")
    assert told.returncode == 4
    assert victim.name in told.stdout
    assert json.loads(project.run("verify", "--json").stdout)["damaged"] is True


def test_warning_of_damage_names_the_object(project: Project) -> None:
    project.compile()
    victim = next(path for path in (project.store / "actions").rglob("*") if path.is_file())
    victim.write_bytes(b"{}")
    done = project.compile()
    assert done.returncode == 0
    assert done.stderr.startswith(f"warning: {victim} ")
    assert len(done.stderr.splitlines()) == 1
    assert "compiled" in done.stdout


def edited(old: str, new: str) -> str:
    assert old in SPEC
    return SPEC.replace(old, new)


BAD_SPECS = {
    "TOML syntax": ("[network\n", "not TOML", "line 1"),
    "no network table": ("[parameters]\n", "[network]", ""),
    "unknown key": (edited("frontend =", "frontent ="), "'frontent'", "did you mean 'frontend'"),
    "missing key": (edited('entrypoint = "kernels/*.c"\n', ""), "network.entrypoint", "required"),
    "wrong type": (edited('name = "kernels"', "name = 5"), "network.name", "string"),
    "unknown table": (SPEC + "[limit]\n", "'limit'", "did you mean 'limits'"),
    "unknown limit": (SPEC + "[limits]\ncompile_second = 3\n", "'compile_second'", "did you mean 'compile_seconds'"),
    "limit of a wrong type": (SPEC + '[limits]\ncompile_seconds = "long"\n', "limits.compile_seconds", "number"),
    "unknown frontend": (edited('"file"', '"fil"'), "'fil'", "id you mean 'file'"),
    "unknown backend": (edited('"command"', '"comand"'), "'comand'", "id you mean 'command'"),
    "unknown target option": (edited("argv", "arg"), "'arg'", "did you mean 'argv'"),
    "no targets": (SPEC[: SPEC.index("[targets")], "targets", "equired"),
    "name with ../": (edited('name = "kernels"', 'name = "../kernels"'), "'../kernels'", "not a valid name"),
    "target with /": (edited("[targets.native]", '[targets."a/b"]'), "'a/b'", "not a valid name"),
    "parameter that JSON cannot hold": (
        edited('ranks = { add = "0-15",', "day = 2026-01-01\nranks = {"),
        "parameters",
        "JSON",
    ),
    "unknown parameter of the frontend": (edited("ranks =", "rank ="), "'rank'", "ranks"),
    "no kernels": (edited("kernels/*.c", "kernels/*.f90"), "kernels/*.f90", ""),
    "missing folder": (edited("kernels/*.c", "nowhere/*.c"), "nowhere", ""),
    "compiler not there": (edited('"cc", "-O1"', '"no-such-cc", "-O1"'), "no-such-cc", "PATH"),
}


@pytest.mark.parametrize("mistake", BAD_SPECS)
def test_bad_spec_gives_one_clear_line(project: Project, mistake: str) -> None:
    text, *wanted = BAD_SPECS[mistake]
    project.spec.write_text(text)
    done = project.compile()
    assert_one_clear_error(done, wanted)
    assert not project.store.exists() or not list((project.store).rglob("plans/*"))


BAD_CALLS: dict[str, tuple[list[str], list[str]]] = {
    "missing spec": (["compile", "nowhere.toml"], ["nowhere.toml"]),
    "spec is a folder": (["compile", "kernels"], ["kernels"]),
    "unknown target": (["compile", "kernels.toml", "--target", "nativ"], ["'nativ'", "did you mean 'native'"]),
    "unknown parameter": (["compile", "kernels.toml", "--set", "rank=3"], ["'rank'", "did you mean 'ranks'"]),
    "no assignment": (["compile", "kernels.toml", "--set", "ranks"], ["'ranks'", "key=value"]),
    "parameter of a wrong type": (["compile", "kernels.toml", "--set", "ranks=3"], ["ranks", "3"]),
    "bad ranks": (["compile", "kernels.toml", "--ranks", "a"], ["'a'", "13 or 0-15,32"]),
    "ranks that run nothing": (["compile", "kernels.toml", "--no-prefect", "--ranks", "64"], ["64", "0-63"]),
    "unknown protocol": (["compile", "kernels.toml", "--store", "nope://x"], ["nope", "rotocol"]),
    "store below a file": (["compile", "kernels.toml", "--store", "kernels.toml/store"], ["kernels.toml", "--store"]),
    "unknown network": (["show", "kernel"], ["kernel", "nothing"]),
    "network with ../": (["show", "../x"], ["'../x'", "not a valid name"]),
    "log of an unknown network": (["log", "kernels", "add"], ["kernels"]),
    "explain without a plan": (["explain", "kernels"], ["kernels"]),
}


@pytest.mark.parametrize("mistake", BAD_CALLS)
def test_bad_call_gives_one_clear_line(project: Project, mistake: str) -> None:
    arguments, wanted = BAD_CALLS[mistake]
    assert_one_clear_error(project.run(*arguments), wanted)


def assert_one_clear_error(done: "subprocess.CompletedProcess[str]", wanted: list[str]) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for text in wanted:
        assert text in done.stderr


def test_bad_input_is_json_where_scripts_read(project: Project) -> None:
    done = project.run("compile", "nowhere.toml", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["reason"] == "spec-missing"


def test_store_of_a_newer_format_is_refused(project: Project) -> None:
    from graphkiln.storage.documents import seal
    from graphkiln.storage.records import StoreFormat

    project.store.mkdir()
    (project.store / "graphkiln-store.json").write_bytes(seal("store format", StoreFormat(99, "blake3")))
    for arguments in (["compile", "kernels.toml"], ["status"], ["verify"]):
        assert_one_clear_error(project.run(*arguments), ["format 99", "upgrade GraphKiln"])


def test_missing_extra_is_named(project: Project) -> None:
    # An environment without the extra, made for real: no site-packages but those that graphkiln's core needs.
    hidden = project.folder / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "found = m.distribution\n"
        "def distribution(name):\n"
        "    if name in ('jax', 'jaxlib'):\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "m.distribution = distribution\n"
    )
    project.spec.write_text(
        edited('"file"', '"jax"').replace('entrypoint = "kernels/*.c"', 'entrypoint = "network.py:programs"')
    )
    done = project.run("compile", project.spec, environment={"PYTHONPATH": str(hidden)})
    assert_one_clear_error(done, ["jax", "pip install 'graphkiln[jax]'"])


def test_help_lists_commands_and_exit_codes(project: Project) -> None:
    told = project.run("--help").stdout
    for word in ("compile", "status", "show", "verify", "explain", "log", "Exit codes", "130"):
        assert word in told
    assert project.run("--version").stdout.startswith("graphkiln, version ")
    wrong = project.run("compil")
    assert wrong.returncode == 2
    assert "compile" in wrong.stderr


@pytest.mark.parametrize(
    "arguments", ["compile kernels.toml --no-prefect", "show kernels", "show kernels --json", "verify"]
)
def test_a_reader_that_goes_away_ends_the_output_and_not_the_work(project: Project, arguments: str) -> None:
    if not arguments.startswith("compile"):
        project.compile()
    command = f"{sys.executable} -m graphkiln {arguments} --store {project.store} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, cwd=project.folder, timeout=60)
    assert done.returncode == 0
    assert not done.stderr
    assert project.compile_json()[1]["graphs"][0]["state"] == "cached"


@pytest.mark.parametrize("value", ["nan", "inf", "99999999999999999999", "1979-05-27"])
@pytest.mark.parametrize("place", ["--set", "target option", "limit"])
def test_a_value_that_documents_cannot_hold_is_bad_input(project: Project, place: str, value: str) -> None:
    arguments = []
    if place == "--set":
        arguments = ["--set", f"ranks={{ add = [{value}] }}"]
    elif place == "target option":
        project.spec.write_text(edited("argv", f"host_cpu = {value}\nargv"))
    else:
        project.spec.write_text(f"{SPEC}\n[limits]\nmemory_gib = {value}\n")
        if value == "99999999999999999999":
            pytest.skip("more memory than any host has is no limit, which may be meant")
    assert_one_clear_error(project.compile(*arguments), [])


def test_a_whole_number_for_a_number_with_a_point_is_the_same_parameter(project: Project) -> None:
    from graphkiln.tasks.spec import NetworkSpec

    spec = NetworkSpec.model_validate(
        {
            "name": "n",
            "frontend": "file",
            "entrypoint": "k",
            "parameters": {"lr": 1.0},
            "targets": {"t": {"backend": "b"}},
        }
    )
    merged = spec.merged_parameters({"lr": 1})
    assert type(merged["lr"]) is float


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=1", 1), ("a=x", "x"), ('a="1"', "1"), ("a=1\nb=2", "1\nb=2"), ("a=[1, 2]", [1, 2]), ("a=", "")],
)
def test_assignments(text: str, value: object) -> None:
    from graphkiln.tasks.spec import parse_assignment

    assert parse_assignment(text) == ("a", value)


@pytest.mark.parametrize(
    "arguments", [["compile", "--json"], ["compile", "x.toml", "--jobs", "0", "--json"], ["stat", "--json"]]
)
def test_wrong_usage_is_json_too(project: Project, arguments: list[str]) -> None:
    done = project.run(*arguments)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["reason"] == "usage"


def test_two_interrupts_in_a_row_end_the_run_once_and_leave_nothing(project: Project) -> None:
    compiler = project.folder / "slow-cc"
    compiler.write_text("#!/bin/sh\nexec sleep 600\n")
    compiler.chmod(0o755)
    project.spec.write_text(edited('"cc", "-O1"', f'"{compiler}"').replace("argv = ", "version_argv = []\nargv = ", 1))
    for _ in range(3):
        run = subprocess.Popen(
            [
                sys.executable,
                "-u",
                "-m",
                "graphkiln",
                "compile",
                str(project.spec),
                "--no-prefect",
                "--store",
                str(project.store),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert run.stdout is not None
        assert any("compiling" in line for line in run.stdout)
        run.send_signal(signal.SIGINT)
        run.send_signal(signal.SIGINT)
        _, told = run.communicate(timeout=60)
        assert run.returncode == 130
        assert told.strip() == "interrupted: what had compiled is kept"


def test_a_full_store_is_not_the_fault_of_a_kernel_graph(project: Project) -> None:
    project.store.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(project.store)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting is not permitted here")
    try:
        done = project.compile()
        assert done.returncode == 6
        assert "no space left" in done.stderr
    finally:
        subprocess.run(["/bin/umount", str(project.store)], check=True)


def test_a_user_without_a_home_needs_a_store_by_name(project: Project) -> None:
    """As in a container that runs under a user id of its own: no HOME, and no entry in the user database."""
    script = (
        "import os, pwd, runpy, sys\n"
        "def no_entry(uid):\n"
        "    raise KeyError(uid)\n"
        "pwd.getpwuid = no_entry\n"
        "for name in ('HOME', 'PREFECT_HOME', 'XDG_CACHE_HOME', 'GRAPHKILN_STORE'):\n"
        "    os.environ.pop(name, None)\n"
        "sys.argv = ['graphkiln', *sys.argv[1:]]\n"
        "runpy.run_module('graphkiln', run_name='__main__')\n"
    )

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=project.folder, timeout=60)

    assert_one_clear_error(run("status"), ["GRAPHKILN_STORE"])
    assert run("compile", "kernels.toml", "--no-prefect", "--store", str(project.store)).returncode == 0
    assert run("compile", "kernels.toml", "--store", str(project.store)).returncode == 0
