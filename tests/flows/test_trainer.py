"""`ensure` and `load`, as a trainer calls them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import graphkiln
from graphkiln import BadInputError, CompileFailedError, NetworkSpec, NotCommittedError, TargetSpec
from graphkiln.storage.canonical import Json
from graphkiln.tasks.session import CompileSession, Report

ARGV = ["cc", "-O1", "-shared", "-fPIC", "{input}", "-o", "{output}"]


@pytest.fixture(autouse=True)
def no_prefect_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[NetworkSpec]:
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name in ("first", "mid", "last"):
        (folder / f"{name}.c").write_text(f"int {name}(void) {{ return {len(name)}; }}\n")
    yield NetworkSpec(
        name="kernels",
        frontend="file",
        entrypoint="kernels",
        parameters={"ranks": {"first": "0-15", "mid": "16-47", "last": "48-63"}},
        targets={"native": TargetSpec.model_validate({"backend": "command", "argv": ARGV})},
        folder=str(tmp_path),
    )


def test_ensure_returns_what_load_returns(spec: NetworkSpec, store: str) -> None:
    made = graphkiln.ensure(spec, store=store)
    loaded = graphkiln.load("kernels", target="native", store=store)
    assert made.variant == loaded.variant
    assert made.graphs() == loaded.graphs() == ["first", "last", "mid"]
    for graph in loaded.graphs():
        outputs = loaded.load(graph).outputs
        assert outputs == made.load(graph).outputs
        assert all(content.startswith(b"\x7fELF") for content in outputs.values())


def test_graphs_of_a_rank(spec: NetworkSpec, store: str) -> None:
    network = graphkiln.ensure(spec, store=store)
    assert network.graphs(rank=13) == ["first"]
    assert network.graphs(rank=47) == ["mid"]
    assert network.graphs(rank=64) == []
    with pytest.raises(BadInputError, match=r"'midd'.*did you mean 'mid'"):
        network.load("midd")


def test_spec_may_be_a_path(tmp_path: Path, spec: NetworkSpec, store: str) -> None:
    path = tmp_path / "kernels.toml"
    path.write_text(
        '[network]\nname = "kernels"\nfrontend = "file"\nentrypoint = "kernels"\n'
        f'[targets.native]\nbackend = "command"\nargv = {json.dumps(ARGV)}\n'
    )
    assert graphkiln.ensure(path, store=store).graphs() == ["first", "last", "mid"]
    assert graphkiln.ensure(str(path), store=store).graphs(rank=0) == ["first", "last", "mid"]


def test_nothing_is_loaded_before_a_commit(spec: NetworkSpec, store: str, tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError, match="nothing"):
        graphkiln.load("kernels", target="native", store=store)
    (tmp_path / "kernels" / "mid.c").write_text("broken")
    with pytest.raises(CompileFailedError, match="mid: command: compiler-error: cc exited"):
        graphkiln.ensure(spec, store=store)
    with pytest.raises(NotCommittedError):
        graphkiln.load("kernels", target="native", store=store)


def test_other_parameters_are_another_variant_which_a_committed_one_never_stands_in_for(
    spec: NetworkSpec, store: str, tmp_path: Path
) -> None:
    everyone: dict[str, Json] = {"ranks": {"first": "0-63", "mid": "0-63", "last": "0-63"}}
    default = graphkiln.ensure(spec, store=store)
    with pytest.raises(NotCommittedError, match="compiled with ranks"):
        graphkiln.load("kernels", target="native", parameters=everyone, store=store)
    other = graphkiln.ensure(spec, parameters=everyone, store=store)
    assert other.variant != default.variant
    assert graphkiln.load("kernels", target="native", store=store).variant == default.variant
    assert graphkiln.load("kernels", target="native", parameters=everyone, store=store).variant == other.variant
    with pytest.raises(BadInputError, match=r"'rank'.*did you mean 'ranks'"):
        graphkiln.load("kernels", target="native", parameters={"rank": 3}, store=store)


def test_edited_defaults_make_load_ask_which_variant(spec: NetworkSpec, store: str) -> None:
    graphkiln.ensure(spec, store=store)
    edited = spec.model_copy(update={"parameters": {"ranks": "0-63"}})
    graphkiln.ensure(edited, store=store)
    with pytest.raises(NotCommittedError, match="2 committed variants") as caught:
        graphkiln.load("kernels", target="native", store=store)
    assert caught.value.reason == "ambiguous"
    found = graphkiln.load("kernels", target="native", parameters={"ranks": "0-63"}, store=store)
    assert found.parameters == {"ranks": "0-63"}


def test_another_toolchain_is_another_variant(
    spec: NetworkSpec, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphkiln.ensure(spec, store=store)
    wrapper = tmp_path / "bin" / "cc"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\nPATH=/usr/local/bin:/usr/bin:/bin exec cc "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=":")
    with pytest.raises(NotCommittedError, match=r"another toolchain \(backend\."):
        graphkiln.load("kernels", target="native", store=store)


def test_a_host_without_the_compiler_loads_what_others_compiled(
    spec: NetworkSpec, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = graphkiln.ensure(spec, store=store)
    monkeypatch.setenv("PATH", str(tmp_path))
    loaded = graphkiln.load("kernels", target="native", store=store)
    assert loaded.load("mid").outputs == made.load("mid").outputs


def test_changed_source_is_noticed_by_ensure_while_load_says_how_old_it_is(
    spec: NetworkSpec, store: str, tmp_path: Path
) -> None:
    before = graphkiln.ensure(spec, store=store)
    (tmp_path / "kernels" / "mid.c").write_text("int mid(void) { return 42; }\n")
    stale = graphkiln.load("kernels", target="native", store=store)
    assert stale.load("mid").outputs == before.load("mid").outputs
    assert f"committed {before.committed_at:%Y-%m-%d}" in repr(stale)
    after = graphkiln.ensure(spec, store=store)
    assert after.variant == before.variant
    assert after.load("mid").outputs != before.load("mid").outputs
    assert after.load("last").outputs == before.load("last").outputs


def test_load_warns_of_a_network_that_was_changed_and_did_not_compile(
    spec: NetworkSpec, store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = graphkiln.ensure(spec, store=store)
    assert graphkiln.load("kernels", target="native", store=store).variant == before.variant
    assert not caplog.records
    (tmp_path / "kernels" / "mid.c").write_text("broken")
    with pytest.raises(CompileFailedError):
        graphkiln.ensure(spec, store=store)
    caplog.clear()
    loaded = graphkiln.load("kernels", target="native", store=store)
    assert loaded.load("mid").outputs == before.load("mid").outputs
    assert "is outdated" in caplog.text


def test_ensure_returns_what_it_committed_whoever_moves_the_ref_meanwhile(
    spec: NetworkSpec, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another folder has a network of this name: as soon as this run has committed, that one does."""
    from graphkiln.flows import direct

    folder = tmp_path / "other"
    shutil.copytree(tmp_path / "kernels", folder / "kernels")
    (folder / "kernels" / "mid.c").write_text("int mid(void) { return 42; }\n")
    other = spec.model_copy(update={"folder": str(folder)})
    run_direct = direct.run_direct

    def overtaken(session: CompileSession) -> Report:
        report = run_direct(session)
        monkeypatch.setattr(direct, "run_direct", run_direct)
        graphkiln.ensure(other, store=store)
        return report

    monkeypatch.setattr(direct, "run_direct", overtaken)
    made = graphkiln.ensure(spec, store=store)
    theirs = graphkiln.load("kernels", target="native", store=store)
    assert made.variant == theirs.variant
    assert made.load("mid").outputs != theirs.load("mid").outputs
    monkeypatch.undo()
    assert made.load("mid").outputs == graphkiln.ensure(spec, store=store).load("mid").outputs


def test_ensure_goes_on_without_a_prefect_server_that_does_not_answer(
    spec: NetworkSpec, store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("graphkiln.flows.trainer.server_configured", lambda: True)

    def unreachable() -> Callable[[CompileSession, int], bool]:
        def run(_session: CompileSession, _jobs: int) -> bool:
            raise BadInputError("Prefect does not answer", reason="prefect-server")

        return run

    monkeypatch.setattr("graphkiln.flows.trainer.import_flow", unreachable)
    assert graphkiln.ensure(spec, store=store).graphs() == ["first", "last", "mid"]
    assert "going on without Prefect" in caplog.text


def test_load_on_a_warm_store_imports_neither_prefect_nor_pydantic_nor_the_network(
    spec: NetworkSpec, store: str
) -> None:
    graphkiln.ensure(spec, store=store)
    script = (
        "import sys, graphkiln\n"
        f"network = graphkiln.load('kernels', target='native', store={store!r})\n"
        "assert network.load('mid').outputs\n"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in"
        " ('prefect', 'pydantic', 'jax', 'numpy', 'fsspec', 'click', 'rich', 'pyarrow')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_store_in_memory(spec: NetworkSpec) -> None:
    made = graphkiln.ensure(spec, store="memory://trainer")
    assert graphkiln.load("kernels", target="native", store="memory://trainer").variant == made.variant
