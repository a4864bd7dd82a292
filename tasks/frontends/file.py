"""The frontend `file`: every file of a folder is one kernel graph, such as IR or a kernel's source.

The entrypoint is a folder, a folder and a pattern for file names, or a single file, relative to the spec:
``"kernels"``, ``"kernels/*.c"``, ``"kernels/saxpy.c"``. A kernel graph is named after its file, without the suffix.
Files whose name starts with a dot and sub-folders are left out; links are followed.

The one parameter is `ranks`: who runs the kernel graphs. It is either one set of ranks for all of them
(``"0-63"``, ``[0, 2]``, ``13``), or a table that has a set for each of them by name. Without it, rank 0 runs all.
"""

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from graphkiln.storage.canonical import Json, canonical_json
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.keys import KeyPart
from graphkiln.storage.layout import check_name
from graphkiln.storage.ranks import RankSet
from graphkiln.tasks.checks import refuse_unknown
from graphkiln.tasks.contracts import KernelGraph, ParseRequest

PAYLOAD_FORMAT = "file/1"

_SUFFIX = re.compile(r"(\.[A-Za-z0-9_+-]+)?")
_PATTERN_CHARACTERS = frozenset("*?[")


class FileFrontend:
    """Makes a kernel graph of each file; see the module's text."""

    name: ClassVar[str] = "file"

    def fingerprint(self) -> Sequence[KeyPart]:
        """Name the revision of the payload: no other software takes part."""
        return [KeyPart.text("file.format", PAYLOAD_FORMAT)]

    def parse(self, request: ParseRequest) -> Sequence[KernelGraph]:
        """Return one kernel graph for each file, in the order of their names.

        Raises:
            BadInputError: there is no such file or folder, a file is empty, unreadable, or has a name that no
                kernel graph can have, two files give the same name, or a parameter is wrong.
        """
        refuse_unknown(request.parameters, ["ranks"], what="parameter of frontend 'file'", reason="unknown-parameter")
        files = _named(_find(Path(request.folder), request.entrypoint))
        ranks = _ranks(request.parameters.get("ranks", 0), files)
        return [
            KernelGraph(name, pack_file(path.suffix, _read(path)), PAYLOAD_FORMAT, ranks[name])
            for name, path in files.items()
        ]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    suffix: str


def pack_file(suffix: str, data: bytes) -> bytes:
    """Return the payload of a file: a line of JSON with what is to be known besides its bytes, then the bytes.

    Args:
        suffix: end of the file's name, from which compilers tell the language: ``".c"``, or ``""``.
        data: the file's bytes.
    """
    return canonical_json({"suffix": suffix}) + b"\n" + data


def unpack_file(payload: bytes) -> tuple[str, bytes]:
    """Return the suffix and the bytes that `pack_file` was given.

    Raises:
        BadInputError: `payload` is something else.
    """
    line, newline, data = payload.partition(b"\n")
    try:
        suffix = msgspec.json.decode(line, type=_Header).suffix
    except msgspec.DecodeError as error:
        raise BadInputError(f"not a payload of format {PAYLOAD_FORMAT}: {error}", reason="bad-payload") from error
    if not newline or not _SUFFIX.fullmatch(suffix):
        raise BadInputError(f"not a payload of format {PAYLOAD_FORMAT}: suffix {suffix!r}", reason="bad-payload")
    return suffix, data


def _find(base: Path, entrypoint: str) -> list[Path]:
    if not entrypoint or "\0" in entrypoint:
        raise BadInputError(f"entrypoint {entrypoint!r} is not a folder of files", reason="bad-entrypoint")
    path = base / entrypoint
    if path.is_file():
        return [path]
    # What exists is taken at its name, so that a folder may be called `kernels[1]`.
    folder, pattern = (path, "*") if path.is_dir() else (path.parent, path.name)
    if not folder.is_dir() or not _PATTERN_CHARACTERS.intersection(pattern):
        raise BadInputError(
            f"entrypoint {entrypoint!r}: {str(path)!r} is neither a file nor a folder; a pattern such as *.c may"
            " stand in its last part only",
            reason="bad-entrypoint",
        )
    found = [folder / name for name in _visible_names(folder) if fnmatch.fnmatchcase(name, pattern)]
    files = [path for path in found if not path.is_dir()]
    if not files:
        raise BadInputError(
            f"entrypoint {entrypoint!r}: no file in {str(folder)!r} matches {pattern!r}", reason="bad-entrypoint"
        )
    return files


def _visible_names(folder: Path) -> list[str]:
    try:
        return [name for name in (path.name for path in folder.iterdir()) if not name.startswith(".")]
    except OSError as error:
        raise BadInputError(f"cannot list {str(folder)!r}: {error.strerror}", reason="bad-entrypoint") from error


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(paths):
        check_name("kernel graph", path.stem)
        if not _SUFFIX.fullmatch(path.suffix):
            raise BadInputError(
                f"the file {path.name!r} has the suffix {path.suffix!r}, which is not made of letters, digits, '_',"
                " '+' and '-': rename it, or use a pattern that leaves it out",
                reason="bad-suffix",
            )
        if path.stem in files:
            raise BadInputError(
                f"{files[path.stem].name!r} and {path.name!r} would both be the kernel graph {path.stem!r}: rename"
                " one, or use a pattern such as *.c",
                reason="duplicate-name",
            )
        files[path.stem] = path
    return dict(sorted(files.items()))


def _read(path: Path) -> bytes:
    # Reading a pipe or a device could wait for ever.
    if path.exists() and not path.is_file():
        raise BadInputError(f"{str(path)!r} is not a regular file", reason="unreadable-file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"cannot read {str(path)!r}: {error.strerror}", reason="unreadable-file") from error
    if not data:
        raise BadInputError(f"{str(path)!r} is empty", reason="empty-file")
    return data


def _ranks(given: Json, files: dict[str, Path]) -> dict[str, RankSet]:
    if not isinstance(given, dict):
        ranks = _rank_set(given, "ranks")
        return dict.fromkeys(files, ranks)
    refuse_unknown(given, files, what="kernel graph in parameter 'ranks'", reason="bad-ranks")
    # A graph that the table forgets would run on some rank that nobody chose.
    for name in files:
        if name not in given:
            raise BadInputError(
                f"parameter 'ranks' does not say who runs the kernel graph {name!r}", reason="bad-ranks"
            )
    return {name: _rank_set(value, f"ranks.{name}") for name, value in given.items()}


def _rank_set(given: Json, parameter: str) -> RankSet:
    try:
        if isinstance(given, str):
            return RankSet.parse(given)
        items = given if isinstance(given, list) else [given]
        numbers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if not items or len(numbers) != len(items):
            raise ValueError(f"{given!r} is neither ranks such as '0-15,32' nor a list of whole numbers")
        return RankSet.of(numbers)
    except ValueError as error:
        raise BadInputError(f"parameter {parameter!r}: {error}", reason="bad-ranks") from error
