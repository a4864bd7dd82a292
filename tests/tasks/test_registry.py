from pathlib import Path

import pytest

from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.registry import load_backend, load_frontend


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Install":
    monkeypatch.syspath_prepend(tmp_path)
    return Install(tmp_path)


class Install:
    """Installs packages with adapters, as pip would do it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, package: str, *, backend: str, code: str, extra: str = "") -> None:
        (self._folder / f"{package}.py").write_text(code)
        metadata = self._folder / f"{package}-1.0.dist-info"
        metadata.mkdir()
        extras = f"Provides-Extra: {extra}\n" if extra else ""
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n{extras}")
        (metadata / "entry_points.txt").write_text(f"[graphkiln.backends]\n{backend} = {package}:Adapter\n")


def test_the_adapters_of_graphkiln_are_found() -> None:
    assert load_frontend("file").name == "file"
    assert load_backend("command").name == "command"


def test_an_adapter_of_a_third_party_is_found(install: Install) -> None:
    install("registry_third", backend="third", code="class Adapter:\n    name = 'third'\n")
    assert load_backend("third").name == "third"
    assert load_backend("third") is not load_backend("third")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(BadInputError) as caught:
        load_frontend("fiel")
    assert caught.value.reason == "unknown-frontend"
    assert "did you mean 'file'?" in str(caught.value)
    assert "there are: file, jax" in str(caught.value)
    with pytest.raises(BadInputError) as caught:
        load_backend("quantum")
    assert caught.value.reason == "unknown-backend"
    assert "did you mean" not in str(caught.value)


def test_a_missing_package_is_named_with_the_extra_that_brings_it(install: Install) -> None:
    install("registry_torchy", backend="torchy", code="import notorch.compiler", extra="notorch")
    install("registry_plain", backend="plain", code="import nothing_like_that")
    with pytest.raises(BadInputError, match="pip install 'registry_torchy\\[notorch\\]'") as caught:
        load_backend("torchy")
    assert caught.value.reason == "missing-package"
    with pytest.raises(BadInputError, match="needs 'nothing_like_that', which is not installed"):
        load_backend("plain")


@pytest.mark.parametrize(
    ("package", "code"),
    [
        ("registry_no_class", "x = 1"),
        ("registry_no_name", "from graphkiln import nothing_like_that"),
        ("registry_arguments", "class Adapter:\n    def __init__(self, x): pass"),
    ],
)
def test_a_broken_adapter_is_named(install: Install, package: str, code: str) -> None:
    install(package, backend="broken", code=code)
    with pytest.raises(BadInputError, match=rf"backend 'broken' \({package}:Adapter\) cannot be used: .+") as caught:
        load_backend("broken")
    assert caught.value.reason == "broken-backend"


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    for package in ("registry_one", "registry_two"):
        install(package, backend="twice", code="class Adapter: pass")
    with pytest.raises(BadInputError, match="registry_one:Adapter, registry_two:Adapter") as caught:
        load_backend("twice")
    assert caught.value.reason == "ambiguous-backend"
