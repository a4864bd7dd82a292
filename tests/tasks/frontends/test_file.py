"""The frontend `file`: which files become kernel graphs, under which names, and who runs them."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from graphkiln.storage.canonical import Json
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.contracts import KernelGraph, ParseRequest
from graphkiln.tasks.frontends.file import FileFrontend, pack_file, unpack_file


def _parse(folder: Path, entrypoint: str, parameters: Mapping[str, Json] | None = None) -> dict[str, KernelGraph]:
    request = ParseRequest(
        network="net", folder=str(folder), entrypoint=entrypoint, parameters=dict(parameters or {}), platform=""
    )
    graphs = FileFrontend().parse(request)
    assert len({graph.name for graph in graphs}) == len(graphs)
    return {graph.name: graph for graph in graphs}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kernels = tmp_path / "kernels"
    (kernels / "deeper").mkdir(parents=True)
    (kernels / "saxpy.c").write_text("saxpy")
    (kernels / "dot.c").write_text("dot")
    (kernels / "layer.v2.mlir").write_text("layer")
    (kernels / ".hidden.c").write_text("hidden")
    (kernels / "deeper" / "other.c").write_text("other")
    return tmp_path


@pytest.mark.parametrize(
    ("entrypoint", "names"),
    [
        ("kernels", ["dot", "layer.v2", "saxpy"]),
        ("kernels/", ["dot", "layer.v2", "saxpy"]),
        ("./kernels/../kernels", ["dot", "layer.v2", "saxpy"]),
        ("kernels/*", ["dot", "layer.v2", "saxpy"]),
        ("kernels/*.c", ["dot", "saxpy"]),
        ("kernels/[a-m]*.c", ["dot"]),
        ("kernels/saxpy.c", ["saxpy"]),
        ("kernels/deeper", ["other"]),
    ],
)
def test_an_entrypoint_is_a_folder_a_pattern_or_a_file(folder: Path, entrypoint: str, names: list[str]) -> None:
    assert list(_parse(folder, entrypoint)) == names


def test_an_absolute_entrypoint_and_one_outside_the_folder_are_read(folder: Path) -> None:
    expected = _parse(folder, "kernels")
    assert _parse(folder / "kernels" / "deeper", "..") == expected
    assert _parse(Path("/"), str(folder / "kernels")) == expected


def test_a_folder_whose_name_looks_like_a_pattern_is_taken_at_its_name(tmp_path: Path) -> None:
    (tmp_path / "k[1]").mkdir()
    (tmp_path / "k[1]" / "a.c").write_text("a")
    assert list(_parse(tmp_path, "k[1]")) == ["a"]
    assert list(_parse(tmp_path, "k[1]/*.c")) == ["a"]


def test_links_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "kernels" / "linked.c").symlink_to(folder / "kernels" / "deeper" / "other.c")
    (folder / "elsewhere").symlink_to(folder / "kernels")
    assert unpack_file(_parse(folder, "elsewhere")["linked"].payload) == (".c", b"other")


def test_payloads_depend_on_bytes_and_suffix_only(tmp_path: Path) -> None:
    def payload(path: str, text: str) -> bytes:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (graph,) = _parse(file.parent, file.name).values()
        assert graph.payload_format == "file/1"
        return graph.payload

    same = payload("a/saxpy.c", "text")
    assert payload("b/other.c", "text") == same
    assert payload("c/saxpy.cpp", "text") != same
    assert payload("d/saxpy", "text") != same
    assert payload("e/saxpy.c", "text ") != same


@pytest.mark.parametrize("suffix", ["", ".c", ".mlir", ".c++", ".7z"])
@pytest.mark.parametrize("data", [b"x", b"\n", b"a\nb\n", bytes(range(256)), b'{"suffix":".h"}\n'])
def test_a_payload_is_read_back_as_it_was_packed(suffix: str, data: bytes) -> None:
    assert unpack_file(pack_file(suffix, data)) == (suffix, data)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"text",
        b'{"suffix":".c"}',
        b'{"suffix":"/../../x"}\n',
        b'{"suffix":".c","more":1}\n',
        b"{}\n",
        b'{"suffix":1}\n',
        b"\xff\n",
    ],
)
def test_other_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(BadInputError) as caught:
        unpack_file(payload)
    assert caught.value.reason == "bad-payload"


@pytest.mark.parametrize(
    ("parameters", "ranks"),
    [
        ({}, {"dot": "0", "saxpy": "0"}),
        ({"ranks": "0-63"}, {"dot": "0-63", "saxpy": "0-63"}),
        ({"ranks": 13}, {"dot": "13", "saxpy": "13"}),
        ({"ranks": [3, 1, 2, 9]}, {"dot": "1-3,9", "saxpy": "1-3,9"}),
        ({"ranks": {"saxpy": "0-15,32", "dot": [1]}}, {"dot": "1", "saxpy": "0-15,32"}),
    ],
)
def test_ranks(folder: Path, parameters: dict[str, Json], ranks: dict[str, str]) -> None:
    graphs = _parse(folder, "kernels/*.c", parameters)
    assert {name: str(graph.ranks) for name, graph in graphs.items()} == ranks


@pytest.mark.parametrize(
    ("parameters", "reason", "words"),
    [
        ({"rank": "0-3"}, "unknown-parameter", "did you mean 'ranks'?"),
        ({"batch": 3}, "unknown-parameter", "there are: ranks"),
        ({"ranks": ""}, "bad-ranks", "list of ranks"),
        ({"ranks": "3-1"}, "bad-ranks", "ends before it starts"),
        ({"ranks": []}, "bad-ranks", "neither"),
        ({"ranks": [-1]}, "bad-ranks", "-1"),
        ({"ranks": [0, "1"]}, "bad-ranks", "neither"),
        ({"ranks": [True]}, "bad-ranks", "neither"),
        ({"ranks": 1.0}, "bad-ranks", "neither"),
        ({"ranks": None}, "bad-ranks", "neither"),
        ({"ranks": {"saxpy": "0"}}, "bad-ranks", "who runs the kernel graph 'dot'"),
        ({"ranks": {"saxpy": "0", "dott": "1"}}, "bad-ranks", "did you mean 'dot'?"),
        ({"ranks": {"saxpy": "0", "dot": "x"}}, "bad-ranks", "ranks.dot"),
    ],
)
def test_bad_parameters_are_refused(folder: Path, parameters: dict[str, Json], reason: str, words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        _parse(folder, "kernels/*.c", parameters)
    assert caught.value.reason == reason
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("", "not a folder of files"),
        ("a\0b", "not a folder of files"),
        ("missing", "neither a file nor a folder"),
        ("missing/*.c", "neither a file nor a folder"),
        ("kernels/missing.c", "neither a file nor a folder"),
        ("kernels/*.cu", "no file"),
        ("*/saxpy.c", "in its last part only"),
        ("**", "no file"),
        ("empty", "no file"),
    ],
)
def test_entrypoints_that_lead_to_no_file_are_refused(folder: Path, entrypoint: str, words: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(BadInputError) as caught:
        _parse(folder, entrypoint)
    assert caught.value.reason == "bad-entrypoint"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"a b.c", "bad-name"),
        (b"a\nb.c", "bad-name"),
        (b"\xff.c", "bad-name"),
        (b"-a.c", "bad-name"),
        ("kérnel.c".encode(), "bad-name"),
        (b"a" * 101 + b".c", "bad-name"),
        (b"a.c~", "bad-suffix"),
        (b"saxpy.cl", "duplicate-name"),
    ],
)
def test_file_names_that_no_kernel_graph_can_have_are_refused(folder: Path, name: bytes, reason: str) -> None:
    Path(os.fsdecode(os.fsencode(folder / "kernels") + b"/" + name)).write_text("text")
    with pytest.raises(BadInputError) as caught:
        _parse(folder, "kernels")
    assert caught.value.reason == reason
    str(caught.value).encode()
    assert "\n" not in str(caught.value)


def test_a_hidden_file_is_refused_even_by_name(folder: Path) -> None:
    with pytest.raises(BadInputError):
        _parse(folder, "kernels/.hidden.c")


def test_files_without_content_are_refused(folder: Path) -> None:
    (folder / "kernels" / "void.c").touch()
    with pytest.raises(BadInputError, match=r"void\.c' is empty"):
        _parse(folder, "kernels")


def test_a_link_to_nothing_is_not_passed_over(folder: Path) -> None:
    (folder / "kernels" / "gone.c").symlink_to("nowhere")
    with pytest.raises(BadInputError, match="cannot read") as caught:
        _parse(folder, "kernels")
    assert caught.value.reason == "unreadable-file"


def test_a_pipe_is_refused_rather_than_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "kernels" / "pipe.c")
    with pytest.raises(BadInputError, match="not a regular file"):
        _parse(folder, "kernels")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_refused(folder: Path) -> None:
    (folder / "kernels" / "dot.c").chmod(0)
    with pytest.raises(BadInputError, match="cannot read"):
        _parse(folder, "kernels")
    (folder / "kernels").chmod(0o300)
    with pytest.raises(BadInputError, match="cannot list"):
        _parse(folder, "kernels/*.c")


def test_the_fingerprint_names_the_format() -> None:
    assert [part.value for part in FileFrontend().fingerprint()] == ["file/1"]
