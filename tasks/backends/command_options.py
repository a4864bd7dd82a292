"""Options of the backend `command`: what a user writes, checked, and the settings that come of it."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from graphkiln.storage.canonical import Json
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.checks import refuse_unknown
from graphkiln.tasks.fingerprints import cpu_features

_PLACEHOLDERS = ("input", "output", "output_dir")
_TOKEN = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|(?P<stray>[{}])")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# How msgspec says which option is wrong, and which is missing.
_WRONG = re.compile(r"(?P<what>.*) - at \$\.(?P<option>.*)")
_MISSING = re.compile(r"Object missing required field (?P<option>\w+)")
_OUTPUT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
# As in -march=native, -mcpu=native, --iree-llvmcpu-target-cpu=host.
_HOST_CPU = re.compile(r"(.*=)?(native|host)")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may write.

    Attributes:
        argv: the command line. ``{input}``, ``{output}`` and ``{output_dir}`` stand for paths; ``{{`` and ``}}``
            for braces.
        outputs: globs below the output folder: the files that are the artifact. Each must find one at least.
            Unset: the one file ``{output}``.
        output_name: name of the file ``{output}``, for compilers that look at its suffix.
        version_argv: a command line that prints the compiler's version; an empty list: it is not asked. Unset:
            the program with ``--version``.
        env: names of environment variables that the compiler sees.
        failure_patterns: regular expressions; a line of the compiler's output that one of them is found in means
            failure, whatever the exit code.
        tools: programs and files that the compiler uses in its turn, by name on PATH or absolute path.
        host_cpu: whether the result depends on this host's CPU. Unset: if an argument says ``native`` or ``host``.
    """

    argv: list[str]
    outputs: list[str] | None = None
    output_name: str = "output"
    version_argv: list[str] | None = None
    env: list[str] = []
    failure_patterns: list[str] = []
    tools: list[str] = []
    host_cpu: bool | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The options with nothing left open; see `Options` for those that are the same.

    Attributes:
        argv: as in the options.
        outputs: as in the options.
        output_name: as in the options.
        version_argv: as in the options.
        env: digest of the value of each variable, or None if it is not set. Settings are stored, and values may be
            secret.
        failure_patterns: as in the options.
        tools: as in the options.
        host_cpu: what the system says of this host's CPU, or None if the result does not depend on it.
    """

    argv: list[str]
    outputs: list[str]
    output_name: str
    version_argv: list[str]
    env: dict[str, str | None]
    failure_patterns: list[str]
    tools: list[str]
    host_cpu: dict[str, str] | None

    @staticmethod
    def of(settings: Mapping[str, Json]) -> "Settings":
        """Read what `resolved_settings` returned."""
        return msgspec.convert(settings, Settings)


def resolved_settings(given: Mapping[str, Json]) -> dict[str, Json]:
    """Return the `Settings` of a target's options, as JSON.

    Raises:
        BadInputError: an option is missing, unknown or has a wrong type or value.
    """
    refuse_unknown(given, Options.__struct_fields__, what="option of backend 'command'", reason="unknown-option")
    try:
        options = msgspec.convert(dict(given), Options)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from error
    _check_texts(options)
    used = _used_placeholders(options.argv)
    _check_program("argv", options.argv)
    if "input" not in used:
        raise _bad("argv has no {input}, the file to compile")
    version_argv = [options.argv[0], "--version"] if options.version_argv is None else options.version_argv
    if version_argv:
        _check_program("version_argv", version_argv)
    _check_patterns(options.failure_patterns)
    for tool in options.tools:
        _check_program("tools", [tool])
    settings = Settings(
        argv=options.argv,
        outputs=_outputs(options, used),
        output_name=options.output_name,
        version_argv=version_argv,
        env=_env_digests(options.env),
        failure_patterns=options.failure_patterns,
        tools=options.tools,
        host_cpu=_host_cpu(options),
    )
    resolved: dict[str, Json] = msgspec.to_builtins(settings)
    return resolved


def fill_in(argument: str, values: Mapping[str, str]) -> str:
    """Return an argument of the template with its placeholders replaced, and its double braces by single ones."""

    def replaced(match: re.Match[str]) -> str:
        name = match["name"]
        return match[0][0] if name is None else values[name]

    return _TOKEN.sub(replaced, argument)


def _bad(message: str) -> BadInputError:
    return BadInputError(f"backend 'command': {message}", reason="bad-option")


def _wrong_type(error: msgspec.ValidationError) -> BadInputError:
    text = str(error).replace("`", "")
    if wrong := _WRONG.fullmatch(text):
        option, what = wrong["option"], f": {wrong['what'][0].lower()}{wrong['what'][1:]}"
    elif missing := _MISSING.fullmatch(text):
        option, what = missing["option"], " is missing"
    else:
        return _bad(text)
    return BadInputError(f"option {option} of backend 'command'{what}", reason="bad-option")


def _check_texts(options: Options) -> None:
    lists: dict[str, Sequence[str]] = {
        "argv": options.argv,
        "version_argv": options.version_argv or (),
        "tools": options.tools,
    }
    for option, texts in lists.items():
        if any("\0" in text for text in texts):
            raise _bad(f"{option} holds a null character")
    for option, texts in {"tools": options.tools, "env": options.env}.items():
        if len(set(texts)) != len(texts):
            raise _bad(f"{option} names something twice: {', '.join(texts)}")


def _used_placeholders(argv: Iterable[str]) -> set[str]:
    used: set[str] = set()
    for argument in argv:
        for match in _TOKEN.finditer(argument):
            name = match["name"]
            if match["stray"] or (name is not None and name not in _PLACEHOLDERS):
                raise _bad(
                    f"argv: {match[0]!r} in {argument!r} is not a placeholder: there are {{input}}, {{output}} and"
                    " {output_dir}; a brace itself is written {{ or }}"
                )
            if name is not None:
                used.add(name)
    return used


def _check_program(option: str, argv: Sequence[str]) -> None:
    program = argv[0] if argv else ""
    if not program:
        raise _bad(f"{option} names no program")
    if "{" in program or "}" in program:
        raise _bad(f"{option}: the program {program!r} has braces in its name")
    # A relative path would mean one thing here and another in the folder in which the compiler runs.
    if "/" in program and not Path(program).is_absolute():
        raise _bad(f"{option}: {program!r} is a relative path; give a name that is on PATH, or an absolute path")


def _outputs(options: Options, used: set[str]) -> list[str]:
    if not _OUTPUT_NAME.fullmatch(options.output_name):
        raise _bad(f"output_name {options.output_name!r} is not a plain file name")
    if "output" not in used and options.output_name != "output":
        raise _bad("output_name is given, but argv has no {output}")
    if not used & {"output", "output_dir"}:
        raise _bad("argv has neither {output} nor {output_dir}: the compiler must be told where to write")
    if options.outputs is None:
        if "output" not in used:
            raise _bad("argv has {output_dir} only: say in `outputs` which files below it are the artifact")
        return [options.output_name]
    if not options.outputs:
        raise _bad("outputs is empty: leave it out, or name a file")
    for pattern in options.outputs:
        parts = PurePosixPath(pattern).parts
        if not parts or pattern.startswith("/") or ".." in parts or "\0" in pattern:
            raise _bad(f"outputs: {pattern!r} is not a path below the output folder")
        if any("**" in part and part != "**" for part in parts) or parts[-1] == "**":
            raise _bad(f"outputs: in {pattern!r}, ** must be a whole part of the path, and not the last")
    return options.outputs


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            matches_nothing = re.compile(pattern).search("") is not None
        except re.error as error:
            raise _bad(f"failure_patterns: {pattern!r} is not a regular expression: {error}") from error
        if matches_nothing:
            raise _bad(f"failure_patterns: {pattern!r} matches an empty line, so that nothing would ever compile")


def _env_digests(names: Iterable[str]) -> dict[str, str | None]:
    digests: dict[str, str | None] = {}
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise _bad(f"env: {name!r} is not the name of an environment variable")
        value = os.environ.get(name)
        digests[name] = None if value is None else digest_bytes(os.fsencode(value))
    return digests


def _host_cpu(options: Options) -> dict[str, str] | None:
    depends = options.host_cpu
    if depends is None:
        depends = any(_HOST_CPU.fullmatch(argument) for argument in options.argv[1:])
    return cpu_features() if depends else None
