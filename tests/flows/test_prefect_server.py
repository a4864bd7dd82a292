"""Whether a Prefect server is configured, as GraphKiln and as Prefect see it, and what the command line makes of it."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from graphkiln.flows.prefect_server import server_configured
from graphkiln.storage.errors import BadInputError

URL = "http://configured/api"
PROFILES = f"""
active = "plain"
[profiles.plain]
PREFECT_LOGGING_LEVEL = "INFO"
[profiles.serving]
PREFECT_API_URL = "{URL}"
"""
SERVING = PROFILES.replace('active = "plain"', 'active = "serving"')
BROKEN = "[[["


Answer = Literal["server", "no server", "unreadable"]


@dataclass
class Case:
    """Settings: `environment` with {home} and {here}, files in the working directory, and the profiles at home."""

    name: str
    answer: Answer
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    profiles: str | None = None


CASES = [
    Case("nothing", "no server"),
    Case("environment", "server", {"PREFECT_API_URL": URL}),
    Case("environment-empty", "no server", {"PREFECT_API_URL": ""}),
    Case("environment-empty-over-profile", "no server", {"PREFECT_API_URL": ""}, profiles=SERVING),
    Case("profile", "server", profiles=SERVING),
    Case("profile-without-server", "no server", profiles=PROFILES),
    Case("other-profile", "server", {"PREFECT_PROFILE": "serving"}, profiles=PROFILES),
    Case("other-profile-without-server", "no server", {"PREFECT_PROFILE": "plain"}, profiles=SERVING),
    Case("unknown-profile", "no server", {"PREFECT_PROFILE": "nowhere"}, profiles=SERVING),
    Case("profile-that-comes-with-prefect", "server", {"PREFECT_PROFILE": "local"}),
    Case("ephemeral-profile", "no server", {"PREFECT_PROFILE": "ephemeral"}),
    Case("profiles-of-another-home", "server", {"PREFECT_HOME": "{here}"}, {"profiles.toml": SERVING}, PROFILES),
    Case("another-home-without-profiles", "no server", {"PREFECT_HOME": "{here}"}, profiles=SERVING),
    Case("profiles-path", "server", {"PREFECT_PROFILES_PATH": "{here}/mine.toml"}, {"mine.toml": SERVING}, PROFILES),
    Case("profiles-path-missing", "no server", {"PREFECT_PROFILES_PATH": "{here}/mine.toml"}, profiles=SERVING),
    Case("profiles-broken", "unreadable", profiles=BROKEN),
    Case("dotenv", "server", files={".env": f"PREFECT_API_URL={URL}\n"}),
    Case("dotenv-quoted", "server", files={".env": f'# a server\nexport PREFECT_API_URL="{URL}"\n'}),
    Case("dotenv-of-others", "no server", files={".env": "OTHER=1\n"}),
    Case("dotenv-empty-over-profile", "no server", files={".env": "PREFECT_API_URL=\n"}, profiles=SERVING),
    Case("dotenv-profiles-path", "server", files={".env": "PREFECT_PROFILES_PATH=mine.toml\n", "mine.toml": SERVING}),
    Case("prefect-toml", "server", files={"prefect.toml": f'[api]\nurl = "{URL}"\n'}),
    Case("prefect-toml-profiles-path", "server", files={"prefect.toml": 'profiles_path = "m.toml"', "m.toml": SERVING}),
    Case("prefect-toml-broken", "unreadable", {"PREFECT_API_URL": URL}, {"prefect.toml": BROKEN}),
    Case("pyproject", "server", files={"pyproject.toml": f'[tool.prefect.api]\nurl = "{URL}"\n'}),
    Case(
        "pyproject-of-others",
        "no server",
        files={"pyproject.toml": '[tool.ruff]\nline-length = 88\n[project]\nname = "x"\n'},
    ),
    Case("pyproject-broken", "unreadable", files={"pyproject.toml": BROKEN}),
    Case("environment-empty-over-files", "no server", {"PREFECT_API_URL": ""}, {".env": f"PREFECT_API_URL={URL}"}),
]

# Prefect's own answer to all cases, from one process: its import takes longer than everything else.
ASK_PREFECT = """
import json, os, sys, warnings
from pathlib import Path
from prefect.context import root_settings_context

warnings.simplefilter("ignore")
answers = {}
profiles = Path.home() / ".prefect" / "profiles.toml"
for case in json.load(sys.stdin):
    os.chdir(case["folder"])
    os.environ.update(case["environment"])
    if case["profiles"] is not None:
        profiles.write_text(case["profiles"])
    try:
        answers[case["name"]] = "server" if root_settings_context().settings.api.url else "no server"
    except ValueError:
        answers[case["name"]] = "unreadable"
    profiles.unlink(missing_ok=True)
    for name in case["environment"]:
        del os.environ[name]
print(json.dumps(answers))
"""


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRAPHKILN_"))}
    return {**clean, "HOME": str(home), "DO_NOT_TRACK": "1", **more}


def prepare(case: Case, folder: Path) -> dict[str, str]:
    folder.mkdir()
    for name, text in case.files.items():
        (folder / name).write_text(text)
    return {name: value.format(here=folder) for name, value in case.environment.items()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    (folder / ".prefect").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_configured_server_is_found(case: Case, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    for name, value in prepare(case, tmp_path / case.name).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path / case.name)
    if case.profiles is not None:
        (home / ".prefect" / "profiles.toml").write_text(case.profiles)
    if case.answer == "unreadable":
        with pytest.raises(BadInputError, match="cannot be read"):
            server_configured()
    else:
        assert server_configured() == (case.answer == "server")


def test_prefect_agrees(tmp_path: Path, home: Path) -> None:
    cases = [
        {
            "name": case.name,
            "folder": str(tmp_path / case.name),
            "environment": prepare(case, tmp_path / case.name),
            "profiles": case.profiles,
        }
        for case in CASES
    ]
    done = subprocess.run(
        [sys.executable, "-c", ASK_PREFECT],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(home),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {case.name: case.answer for case in CASES}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "add.c").write_text("int run(int a, int b) { return a + b; }\n")
    path = tmp_path / "spec.toml"
    path.write_text(
        textwrap.dedent(
            """
            [network]
            name = "kernels"
            frontend = "file"
            entrypoint = "kernels/*.c"
            [targets.native]
            backend = "command"
            argv = ["cc", "-shared", "-fPIC", "{input}", "-o", "{output}"]
            """
        )
    )
    return path


def run(spec: Path, home: Path, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=spec.parent,
        env=clean_environment(home, GRAPHKILN_STORE=str(spec.parent / "store"), **environment),
        timeout=120,
    )


def test_what_is_cached_is_answered_without_prefect(spec: Path, home: Path) -> None:
    cold = run(spec, home, "-m", "graphkiln", "compile", str(spec), "--no-prefect")
    assert cold.returncode == 0, cold.stderr
    code = """
    import sys
    from graphkiln.flows.cli import cli
    code = cli.main(["compile", "spec.toml"], standalone_mode=False)
    heavy = {"prefect", "httpx", "sqlalchemy"} & set(sys.modules)
    assert not heavy, heavy
    sys.exit(code)
    """
    warm = run(spec, home, "-c", textwrap.dedent(code))
    assert warm.returncode == 0, warm.stderr
    assert "1 cached; committed manifest" in warm.stdout
    assert "embedded server" not in warm.stdout


def test_a_trainer_without_a_server_does_not_import_prefect(spec: Path, home: Path) -> None:
    code = """
    import sys
    import graphkiln
    network = graphkiln.ensure("spec.toml")
    assert network.graphs() == ["add"]
    heavy = {"prefect", "httpx", "sqlalchemy"} & set(sys.modules)
    assert not heavy, heavy
    """
    done = run(spec, home, "-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:9/api", "Prefect's server cannot be used: Failed to reach API at http://127.0.0.1:9/api/"),
        ("127.0.0.1:4200/api", "Prefect's server cannot be used: Failed to reach API at 127.0.0.1:4200/api/"),
        ("http://[::1/api", "Prefect does not accept its settings: "),
    ],
    ids=["nobody-listens", "no-scheme", "no-url"],
)
@pytest.mark.prefect
def test_a_server_that_cannot_be_reached_is_one_clear_line(spec: Path, home: Path, url: str, told: str) -> None:
    done = run(spec, home, "-m", "graphkiln", "compile", str(spec), PREFECT_API_URL=url)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {told}")


def test_settings_that_prefect_cannot_read_are_one_clear_line(spec: Path, home: Path) -> None:
    (spec.parent / "prefect.toml").write_text(BROKEN)
    done = run(spec, home, "-m", "graphkiln", "compile", str(spec))
    assert done.returncode == 2
    assert done.stderr.startswith("error: Prefect's settings in prefect.toml cannot be read: ")
    assert len(done.stderr.splitlines()) == 1
    assert run(spec, home, "-m", "graphkiln", "compile", str(spec), "--no-prefect").returncode == 0


def test_a_trainer_goes_on_without_a_server_that_does_not_answer(spec: Path, home: Path) -> None:
    code = "import graphkiln\nprint(*graphkiln.ensure('spec.toml').graphs())"
    done = run(spec, home, "-c", code, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()
    assert "Prefect's server cannot be used: " in done.stderr
    assert "going on without Prefect" in done.stderr
