"""The backend `command`: a real C compiler, and small programs that misbehave in the ways that compilers do."""

import ctypes
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from graphkiln.storage.canonical import Json, canonical_json
from graphkiln.storage.errors import BadInputError, CompileFailedError, GraphKilnError
from graphkiln.storage.keys import KeyPart
from graphkiln.tasks.backends import command
from graphkiln.tasks.backends.command import CommandArtifact, CommandBackend
from graphkiln.tasks.contracts import CompileRequest
from graphkiln.tasks.frontends.file import pack_file

CC: list[Json] = ["cc", "-O2", "-shared", "-fPIC", "{input}", "-o", "{output}"]
SAXPY = b"void saxpy(int n, float a, const float *x, float *y) { for (int i = 0; i < n; i++) y[i] += a * x[i]; }\n"

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no cc")


def _resolved(**options: Any) -> dict[str, Json]:
    return CommandBackend().resolve(options).settings


def _compile(
    folder: Path, source: bytes, suffix: str = ".c", graph: str = "graph", **options: Any
) -> Mapping[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    request = CompileRequest(
        graph=graph,
        payload=pack_file(suffix, source),
        payload_format="file/1",
        settings=_resolved(**options),
        folder=folder,
    )
    return CommandBackend().compile(request)


def _shell(folder: Path, script: str, **options: Any) -> Mapping[str, bytes]:
    """Compile with a compiler that is a shell script: $1 is the input, $2 the output, $3 the output folder."""
    argv: list[Json] = ["/bin/sh", "-c", script.replace("{", "{{").replace("}", "}}"), "compiler"]
    return _compile(folder, b"text", argv=[*argv, "{input}", "{output}", "{output_dir}"], **options)


def _failure(folder: Path, script: str, **options: Any) -> CompileFailedError:
    with pytest.raises(CompileFailedError) as caught:
        _shell(folder, script, **options)
    return caught.value


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., str]:
    def write(text: str, name: str = "compiler", folder: str = "bin") -> str:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    return write


def _parts(settings: Mapping[str, Json]) -> dict[str, KeyPart]:
    parts = CommandBackend().fingerprint(settings)
    found = {part.name: part for part in parts}
    assert len(found) == len(parts)
    return found


# --- options ---


def test_what_is_left_open_is_filled_in() -> None:
    resolution = CommandBackend().resolve({"argv": ["cc", "{input}", "-o", "{output}"]})
    assert resolution.platform == ""
    assert resolution.settings == {
        "argv": ["cc", "{input}", "-o", "{output}"],
        "outputs": ["output"],
        "output_name": "output",
        "version_argv": ["cc", "--version"],
        "env": {},
        "failure_patterns": [],
        "tools": [],
        "host_cpu": None,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "argv"),
        ({"argv": "cc {input}"}, "argv"),
        ({"argv": []}, "names no program"),
        ({"argv": ["", "{input}", "{output}"]}, "names no program"),
        ({"argv": ["cc", 1]}, "argv"),
        ({"argv": ["cc", "{input}"]}, "neither {output} nor {output_dir}"),
        ({"argv": ["cc", "{output}"]}, "has no {input}"),
        ({"argv": ["cc", "{{input}}", "{output}"]}, "has no {input}"),
        ({"argv": ["cc", "{input}", "{outptu}"]}, "'{outptu}' in '{outptu}' is not a placeholder"),
        ({"argv": ["cc", "{input}", "{output}", "{name}"]}, "not a placeholder"),
        ({"argv": ["cc", "{input!r}", "{output}"]}, "not a placeholder"),
        ({"argv": ["cc", "{input}", "{output}", "{"]}, "not a placeholder"),
        ({"argv": ["cc", "{input}", "{output}", "a}b"]}, "not a placeholder"),
        ({"argv": ["cc", "{input}", "{output}", "{}"]}, "not a placeholder"),
        ({"argv": ["{input}", "{output}"]}, "braces"),
        ({"argv": ["bin/cc", "{input}", "{output}"]}, "relative path"),
        ({"argv": ["cc", "{input}", "{output}", "\0"]}, "null character"),
        ({"argv": CC, "ouputs": ["a"]}, "did you mean 'outputs'?"),
        ({"argv": CC, "shell": True}, "there are: argv"),
        ({"argv": CC, "outputs": []}, "outputs is empty"),
        ({"argv": CC, "outputs": "a"}, "outputs"),
        ({"argv": CC, "outputs": [""]}, "below the output folder"),
        ({"argv": CC, "outputs": ["../x"]}, "below the output folder"),
        ({"argv": CC, "outputs": ["/etc/passwd"]}, "below the output folder"),
        ({"argv": CC, "outputs": ["**"]}, "**"),
        ({"argv": CC, "outputs": ["a**/b"]}, "**"),
        ({"argv": ["cc", "{input}", "{output_dir}"]}, "{output_dir} only"),
        ({"argv": ["cc", "{input}", "{output_dir}"], "outputs": ["a"], "output_name": "a"}, "has no {output}"),
        ({"argv": CC, "output_name": "../a"}, "plain file name"),
        ({"argv": CC, "output_name": ".."}, "plain file name"),
        ({"argv": CC, "output_name": "a/b"}, "plain file name"),
        ({"argv": CC, "output_name": ""}, "plain file name"),
        ({"argv": CC, "version_argv": ["./cc"]}, "relative path"),
        ({"argv": CC, "version_argv": [""]}, "version_argv names no program"),
        ({"argv": CC, "version_argv": "cc"}, "version_argv"),
        ({"argv": CC, "env": ["A=B"]}, "name of an environment variable"),
        ({"argv": CC, "env": {"A": "B"}}, "env"),
        ({"argv": CC, "env": ["A", "A"]}, "twice"),
        ({"argv": CC, "tools": ["as", "as"]}, "twice"),
        ({"argv": CC, "tools": ["../as"]}, "relative path"),
        ({"argv": CC, "failure_patterns": ["("]}, "not a regular expression"),
        ({"argv": CC, "failure_patterns": [""]}, "matches an empty line"),
        ({"argv": CC, "failure_patterns": ["E?"]}, "matches an empty line"),
        ({"argv": CC, "host_cpu": "yes"}, "host_cpu"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Json], words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        CommandBackend().resolve(options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.reason in ("bad-option", "unknown-option")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"argv": CC, "tools": "as"}, "option tools of backend 'command': expected array, got str"),
        ({"argv": ["cc", 1]}, "option argv[1] of backend 'command': expected str, got int"),
        ({"argv": CC, "host_cpu": "yes"}, "option host_cpu of backend 'command': expected bool | null, got str"),
        ({}, "option argv of backend 'command' is missing"),
    ],
)
def test_an_option_of_a_wrong_type_is_named(options: dict[str, Json], message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        CommandBackend().resolve(options)
    assert (str(caught.value), caught.value.reason) == (message, "bad-option")


@pytest.mark.parametrize(
    "change",
    [
        {"argv": [*CC, "-g"]},
        {"argv": ["gcc", *CC[1:]]},
        {"outputs": ["*"]},
        {"output_name": "a.so"},
        {"version_argv": []},
        {"env": ["GRAPHKILN_TEST"]},
        {"failure_patterns": ["warning"]},
        {"tools": ["as"]},
        {"host_cpu": True},
    ],
)
def test_every_option_changes_the_settings(change: dict[str, Json]) -> None:
    assert _resolved(argv=CC) != _resolved(**{"argv": CC, **change})


@pytest.mark.parametrize("argument", ["-march=native", "--iree-llvmcpu-target-cpu=host", "native"])
def test_asking_for_the_hosts_cpu_puts_it_into_the_key(argument: str) -> None:
    assert _resolved(argv=[*CC, argument])["host_cpu"]
    assert _resolved(argv=[*CC, argument], host_cpu=False)["host_cpu"] is None
    assert _resolved(argv=[*CC, "-march=x86-64-v3"])["host_cpu"] is None


def test_settings_hold_digests_of_variables_and_not_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings() -> dict[str, Json]:
        return _resolved(argv=CC, env=["GRAPHKILN_TEST"])

    monkeypatch.delenv("GRAPHKILN_TEST", raising=False)
    seen = [settings()]
    for value in ("", "secret-1", "secret-2"):
        monkeypatch.setenv("GRAPHKILN_TEST", value)
        seen.append(settings())
        assert settings() == seen[-1]
    assert len({canonical_json(item) for item in seen}) == len(seen)
    assert b"secret" not in b"".join(canonical_json(item) for item in seen)


def test_a_variable_that_changes_after_the_key_was_made_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CommandBackend()
    monkeypatch.setenv("GRAPHKILN_TEST", "before")
    monkeypatch.delenv("GRAPHKILN_UNSET", raising=False)
    settings = _resolved(argv=CC, env=["GRAPHKILN_TEST", "GRAPHKILN_UNSET"])
    assert backend.environment(settings) == {"GRAPHKILN_TEST": "before"}
    monkeypatch.setenv("GRAPHKILN_UNSET", "")
    with pytest.raises(BadInputError, match="GRAPHKILN_UNSET has changed"):
        backend.environment(settings)
    monkeypatch.delenv("GRAPHKILN_UNSET")
    monkeypatch.setenv("GRAPHKILN_TEST", "after")
    with pytest.raises(BadInputError, match="GRAPHKILN_TEST has changed") as caught:
        backend.environment(settings)
    assert "after" not in str(caught.value)
    assert "before" not in str(caught.value)


def test_the_snippets_of_the_users_page_are_valid() -> None:
    page = Path(__file__).parents[3] / "docs" / "command-backend.md"
    names = set()
    for snippet in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        document = tomllib.loads(snippet)
        for name, target in document.get("targets", {"": document}).items():
            names.add(name)
            CommandBackend().resolve({option: value for option, value in target.items() if option != "backend"})
    assert names == {"native", "", "iree-cpu", "ascend", "tensorrt", "trn1", "h100"}


# --- fingerprint ---

_COMPILER = "#!/bin/sh\necho compiler 1.0\n"


def test_a_fingerprint_is_the_program_and_its_version_and_no_path(program: Callable[..., str], tmp_path: Path) -> None:
    def parts(folder: str, text: str = _COMPILER, **options: Any) -> dict[str, KeyPart]:
        path = program(text, folder=folder)
        return _parts(_resolved(argv=[path, "{input}", "{output}"], **options))

    first = parts("one")
    assert first["command.version"].value == "compiler 1.0\n"
    assert parts("two") == first
    assert str(tmp_path) not in str(first)
    newer = parts("three", _COMPILER.replace("1.0", "1.1"))
    for name in ("command.program", "command.version", "command.version-output"):
        assert newer[name] != first[name]
    rebuilt = parts("four", _COMPILER + "# rebuilt\n")
    assert rebuilt["command.program"] != first["command.program"]
    assert rebuilt["command.version"] == first["command.version"]
    unasked = parts("one", version_argv=[])
    assert set(first) - set(unasked) == {"command.version", "command.version-output"}


def test_the_path_of_a_scripts_interpreter_does_not_count_but_the_rest_does(program: Callable[..., str]) -> None:
    def digest(text: str) -> Json:
        settings = _resolved(argv=[program(text), "{input}", "{output}"], version_argv=[])
        return _parts(settings)["command.program"].value

    here = digest("#!/home/one/venv/bin/python\nmain()\n")
    assert digest("#!/home/two/venv/bin/python\nmain()\n") == here
    assert digest("#!/home/one/venv/bin/python3\nmain()\n") != here
    assert digest("#!/home/one/venv/bin/python -O\nmain()\n") != here
    assert digest("#!/home/one/venv/bin/python\nmain(1)\n") != here


def test_tools_count(program: Callable[..., str], tmp_path: Path) -> None:
    compiler = program(_COMPILER)
    library = tmp_path / "library.so"

    def digest(content: str) -> Json:
        library.write_text(content)
        settings = _resolved(argv=[compiler, "{input}", "{output}"], tools=["sh", str(library)])
        found = _parts(settings)
        assert "command.tool.sh" in found
        return found[f"command.tool.{library}"].value

    assert digest("one") == digest("one") != digest("two")


def test_the_version_is_asked_in_the_compilers_environment(
    program: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHKILN_TEST", "seen")
    monkeypatch.setenv("GRAPHKILN_OTHER", "not seen")
    path = program('#!/bin/sh\necho "[$GRAPHKILN_TEST][$GRAPHKILN_OTHER]"\n')
    settings = _resolved(argv=[path, "{input}", "{output}"], env=["GRAPHKILN_TEST"])
    assert _parts(settings)["command.version"].value == "[seen][]\n"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/sh\necho unknown option >&2\nexit 3\n", ["exited with code 3", "unknown option"]),
        ("#!/bin/sh\nkill -9 $$\n", ["was ended by SIGKILL"]),
        ("#!/no/such/interpreter\n", ["cannot start"]),
        ("#!/bin/sh\nsleep 1000 & wait\n", ["took more than 0.2 s"]),
        ("#!/bin/sh\nexec >&- 2>&-\nexec sleep 1000\n", ["took more than 0.2 s"]),
        ("#!/bin/sh\nyes\n", ["took more than 0.2 s"]),
    ],
)
def test_a_compiler_that_does_not_tell_its_version_is_refused(
    program: Callable[..., str], monkeypatch: pytest.MonkeyPatch, script: str, words: list[str]
) -> None:
    if "1000" in script or "yes" in script:
        monkeypatch.setattr(command, "_VERSION_SECONDS", 0.2)
    settings = _resolved(argv=[program(script), "{input}", "{output}"])
    with pytest.raises(BadInputError) as caught:
        CommandBackend().fingerprint(settings)
    assert caught.value.reason == "no-version"
    for word in [*words, "version_argv = []"]:
        assert word in str(caught.value)


def test_a_compiler_that_is_not_installed_is_named() -> None:
    with pytest.raises(BadInputError, match="no-such-compiler") as caught:
        CommandBackend().fingerprint(_resolved(argv=["no-such-compiler", "{input}", "{output}"]))
    assert caught.value.reason == "tool-not-found"
    with pytest.raises(BadInputError, match="no-such-tool"):
        CommandBackend().fingerprint(_resolved(argv=["sh", "{input}", "{output}"], tools=["no-such-tool"]))


# --- compile ---


@needs_cc
def test_cc_makes_a_library_that_runs(tmp_path: Path) -> None:
    outputs = _compile(tmp_path / "work", SAXPY, argv=CC, output_name="saxpy.so")
    assert list(outputs) == ["saxpy.so"]
    artifact = CommandBackend().load(_resolved(argv=CC), outputs, None)
    library = ctypes.CDLL(str(artifact.write_to(tmp_path / "loaded")["saxpy.so"]))
    x, y = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)(10, 20, 30)
    library.saxpy(3, ctypes.c_float(2), x, y)
    assert list(y) == [12, 24, 36]


@needs_cc
def test_the_suffix_tells_the_compiler_the_language(tmp_path: Path) -> None:
    source = b"#ifdef __ASSEMBLER__\nx: .long 1\n#else\nint x;\n#endif\n"
    options: dict[str, Any] = {"argv": ["cc", "-c", "{input}", "-o", "{output}"]}
    as_c = _compile(tmp_path / "a", source, ".c", **options)
    as_assembly = _compile(tmp_path / "b", source, ".S", **options)
    assert as_c != as_assembly


@needs_cc
@pytest.mark.parametrize(
    "argv",
    [
        CC,
        ["cc", "-c", "{input}", "-o", "{output}"],
        ["cc", "-S", "{input}", "-o", "{output}"],
        ["env", "PWD=/proc/self/cwd", "cc", "-g", "-c", "{input}", "-o", "{output}"],
    ],
    ids=["shared", "object", "assembly", "debug"],
)
def test_no_path_or_time_reaches_the_artifact(tmp_path: Path, argv: list[Json]) -> None:
    source = b"const char *where = __FILE__ __DATE__ __TIME__;\n" + SAXPY
    first = _compile(tmp_path / "one", source, graph="one", argv=argv)
    second = _compile(tmp_path / "deeper" / "two", source, graph="two", argv=argv)
    assert first == second
    assert str(tmp_path).encode() not in first["output"]
    assert b"Jan  1 1970" in first["output"]


@needs_cc
def test_a_syntax_error_is_told_in_the_compilers_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompileFailedError) as caught:
        _compile(tmp_path / "work", b"int f(void) { return nothing; }\n", argv=CC)
    message = str(caught.value)
    assert message.startswith("cc exited with code 1:\n")
    assert "input.c:1:" in message
    assert "nothing" in message
    assert str(tmp_path) not in message
    assert (caught.value.reason, caught.value.retryable) == ("compiler-error", False)
    assert "input.c:1:" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("script", "reason", "retryable", "words"),
    [
        ("echo some words; exit 7", "compiler-error", False, ["sh exited with code 7", "some words"]),
        ("echo fatal: out of luck >&2; seq 5000; exit 1", "compiler-error", False, ["fatal: out of luck", "5000"]),
        ("exit 1", "compiler-error", False, ["it printed nothing"]),
        ("echo E19999: Inner Error!; echo TraceBack; echo root cause; exit 1", "compiler-error", False, ["root cause"]),
        ("kill -SEGV $$", "crashed", False, ["was ended by SIGSEGV"]),
        ("kill -KILL $$", "killed", True, ["was ended by SIGKILL"]),
        ("sh -c 'kill -KILL $$'; exit $?", "killed", True, ["exited with code 137 (SIGKILL)"]),
        ("echo Killed signal terminated program cc1; exit 1", "killed", True, ["exited with code 1"]),
        ("echo error: No space left on device; exit 1", "disk-full", True, ["No space left"]),
        ("true", "no-output", False, ["left no file 'output'"]),
        (": > $2", "no-output", False, ["left the output 'output' empty"]),
        ("mkdir $2", "no-output", False, ["left no file 'output'"]),
        ("mkfifo $2", "no-output", False, ["left no file 'output'"]),
        ("ln -s /etc/passwd $2", "no-output", False, ["a link that leads out"]),
        ("ln -s ../$1 $2", "no-output", False, ["a link that leads out"]),
        ("ln -s nowhere $2", "no-output", False, ["left no file 'output'"]),
        ("echo x > $2; echo written; exit 1", "compiler-error", False, ["written"]),
    ],
)
def test_failures(tmp_path: Path, script: str, reason: str, retryable: bool, words: list[str]) -> None:
    error = _failure(tmp_path, script)
    assert (error.reason, error.retryable) == (reason, retryable)
    for word in words:
        assert word in str(error)
    assert str(tmp_path) not in str(error)


def test_the_caller_gets_only_graphkilns_errors_for_a_missing_compiler(tmp_path: Path) -> None:
    for argv in (["no-such-compiler", "{input}", "{output}"], [str(tmp_path), "{input}", "{output}"]):
        with pytest.raises(GraphKilnError, match="cannot start"):
            _compile(tmp_path / argv[0].strip("/"), b"x", argv=list(argv))


def test_a_full_disk_under_the_log_is_not_taken_for_the_compilers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left") as caught:
        _shell(tmp_path, "echo words; echo x > $2")
    assert caught.value.errno == errno.ENOSPC


def test_a_host_that_has_no_process_left_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    error = _failure(tmp_path, "true")
    assert (error.reason, error.retryable) == ("not-started", True)


@pytest.mark.parametrize(
    ("pattern", "printed", "fails"),
    [
        (r"^E\d{5}:", "E19999: Inner Error!", True),
        (r"^E\d{5}:", "see E19999: here", False),
        (r"^ATC run failed", "ATC run failed, see the log", True),
        (r"failed$", "it failed", True),
        (r"(?i)internal error", "INTERNAL ERROR", True),
        (r"error(?! ignored)", "error ignored", False),
        (r"a\s+b", "a\nb", False),
    ],
)
def test_a_failure_pattern_fails_a_compiler_that_exits_with_0(
    tmp_path: Path, pattern: str, printed: str, fails: bool
) -> None:
    script = f"printf '%s' '{printed}' >&2; echo x > $2"
    if not fails:
        assert _shell(tmp_path, script, failure_patterns=[pattern]) == {"output": b"x\n"}
        return
    error = _failure(tmp_path, script, failure_patterns=["never", pattern])
    assert error.reason == "compiler-error"
    assert repr(pattern) in str(error)
    assert printed in str(error)


def test_outputs_keep_their_place_below_the_output_folder(tmp_path: Path) -> None:
    script = (
        "mkdir -p $3/a/b $3/c; echo 1 > $3/a/b/1.bin; echo 2 > $3/2.bin; echo 3 > $3/c/note.txt; ln -s 2.bin $3/3.bin"
    )
    assert _shell(tmp_path / "one", script, outputs=["**/*.bin"]) == {
        "2.bin": b"2\n",
        "3.bin": b"2\n",
        "a/b/1.bin": b"1\n",
    }
    assert set(_shell(tmp_path / "two", script, outputs=["c/*", "2.bin", "*.bin"])) == {"2.bin", "3.bin", "c/note.txt"}
    error = _failure(tmp_path / "three", script, outputs=["**/*.bin", "*.om"])
    assert "'*.om'" in str(error)
    odd = _failure(tmp_path / "four", "echo x > $3/\"$(printf 'a\\nb')\"", outputs=["*"])
    assert "not printable" in str(odd)


def test_braces_and_odd_arguments_reach_the_compiler_as_they_are(tmp_path: Path) -> None:
    script = 'printf "%s|" "$@" > out/output'
    argv: list[Json] = ["/bin/sh", "-c", script, "sh", "{{{input}}}", "--o={output}", "a b", "", "$HOME;*", "{{}}"]
    outputs = _compile(tmp_path, b"x", ".mlir", argv=argv)
    assert outputs == {"output": b"{input.mlir}|--o=out/output|a b||$HOME;*|{}|"}


def test_the_compiler_sees_the_named_variables_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_TEST", "value of it")
    monkeypatch.setenv("GRAPHKILN_OTHER", "another")
    monkeypatch.delenv("GRAPHKILN_UNSET", raising=False)
    argv: list[Json] = [sys.executable, "-c", "import os, sys; print(dict(os.environ), file=open('out/output', 'w'))"]
    outputs = _compile(tmp_path, b"x", argv=[*argv, "{input}", "{output}"], env=["GRAPHKILN_TEST", "GRAPHKILN_UNSET"])
    seen = eval(outputs["output"], {})  # noqa: S307
    assert seen["GRAPHKILN_TEST"] == "value of it"
    # The interpreter itself may set LC_CTYPE.
    assert set(seen) - {"LC_CTYPE"} == {"PATH", "HOME", "TMPDIR", "LC_ALL", "SOURCE_DATE_EPOCH", "GRAPHKILN_TEST"}
    assert Path(seen["HOME"]).is_relative_to(tmp_path)


def test_the_compiler_gets_no_input(tmp_path: Path) -> None:
    assert _shell(tmp_path, 'cat > "$2"; echo end >> "$2"') == {"output": b"end\n"}


def test_a_server_that_the_compiler_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    # It inherits the compiler's output, which thus stays open after the compiler's end.
    outputs = _shell(tmp_path, "sleep 300 & echo $! > $2")
    os.kill(int(outputs["output"]), signal.SIGKILL)


_FLOOD = r"""
import resource, sys
from pathlib import Path
from graphkiln.tasks.backends.command import CommandBackend
from graphkiln.tasks.contracts import CompileRequest
from graphkiln.tasks.frontends.file import pack_file

backend = CommandBackend()
flood = "yes '%s' | head -c 100000000; printf '\\nE19999: the end'; echo x > out/output" % sys.argv[2]
settings = backend.resolve(
    {"argv": ["/bin/sh", "-c", flood, "sh", "{input}", "{output}"], "failure_patterns": ["^E19999"]}
).settings
request = CompileRequest(
    graph="g", payload=pack_file(".c", b"x"), payload_format="file/1", settings=settings, folder=Path(sys.argv[1])
)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    backend.compile(request)
except Exception as error:
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    sys.stderr.write(f"{grown} MiB\n{error}\n")
"""


@pytest.mark.parametrize("line", ["x" * 900, "x" * 100_000], ids=["short-lines", "long-lines"])
def test_a_log_of_100_megabytes_takes_little_memory_and_is_passed_on_whole(tmp_path: Path, line: str) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", _FLOOD, str(tmp_path), line], stdout=file, stderr=subprocess.PIPE, check=True
        )
    size = log.stat().st_size
    log.unlink()
    grown, _, message = done.stderr.decode().partition(" MiB\n")
    assert size >= 100_000_000
    assert int(grown) < 16
    assert "E19999: the end" in message


# --- load ---


def test_a_loaded_artifact_writes_its_files(tmp_path: Path) -> None:
    artifact = CommandBackend().load({}, {"a/b.bin": b"1", "c": b"22"}, None)
    (tmp_path / "c").write_text("an older file")
    for _ in range(2):
        written = artifact.write_to(tmp_path)
        assert written == {"a/b.bin": tmp_path / "a" / "b.bin", "c": tmp_path / "c"}
        assert {name: path.read_bytes() for name, path in written.items()} == artifact.outputs
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b.bin", "c"]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "a" / "b.bin").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("name", ["../a", "/a", "", "a/../../b"])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "inner"
    with pytest.raises(BadInputError, match="leads out"):
        CommandArtifact({name: b"x"}).write_to(folder)
    assert not list(tmp_path.rglob("a"))


def test_files_are_not_bound_to_devices() -> None:
    devices: list[Any] = []
    with pytest.raises(BadInputError, match="devices") as caught:
        CommandBackend().load({}, {"a": b"x"}, devices)
    assert caught.value.reason == "devices-not-supported"
