"""The backend `command`: any compiler that has a command line. docs/command-backend.md is the page for users.

The compiler runs in an empty folder and gets every path relative to it, so that no path of this host reaches the
artifact. It sees a fixed environment and the variables that the target names, and nothing else of the caller's.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from uuid import uuid4

from graphkiln.storage.canonical import Json
from graphkiln.storage.digests import Digest, digest_bytes, digest_file
from graphkiln.storage.errors import BadInputError, CompileFailedError
from graphkiln.storage.keys import KeyPart
from graphkiln.tasks.backends.command_options import Settings, fill_in, resolved_settings
from graphkiln.tasks.backends.command_process import CompilerLog, NotStartedError, ending, reason_of, run
from graphkiln.tasks.contracts import CompileRequest, Resolution
from graphkiln.tasks.fingerprints import tool_path
from graphkiln.tasks.frontends.file import PAYLOAD_FORMAT, unpack_file

# Raise it when the way in which commands are run changes, so that old results are not taken for new ones.
_PROTOCOL = "command/1"
_OUTPUT_FOLDER = "out"
_VERSION_SECONDS = 60.0
_SHOWN_VERSION_CHARACTERS = 1000


class CommandBackend:
    """Runs a compiler's command line; see the module's text."""

    name: ClassVar[str] = "command"
    payload_formats: ClassVar[frozenset[str]] = frozenset({PAYLOAD_FORMAT})

    def resolve(self, options: Mapping[str, Json]) -> Resolution:
        """Check the options, and take the digests of the environment variables that the compiler may see.

        Raises:
            BadInputError: an option is missing, unknown or has a wrong type or value.
        """
        return Resolution(platform="", settings=resolved_settings(options))

    def fingerprint(self, settings: Mapping[str, Json]) -> Sequence[KeyPart]:
        """Name the compiler: the digest of its program and of the `tools`, and what it says of its version.

        Raises:
            BadInputError: a program is not installed, or does not tell its version.
        """
        options = Settings.of(settings)
        parts = [
            KeyPart.text("command.protocol", _PROTOCOL),
            KeyPart.digest("command.program", _program_digest(options.argv[0])),
        ]
        parts += [KeyPart.digest(f"command.tool.{tool}", _program_digest(tool)) for tool in options.tools]
        if options.version_argv:
            output = _version_output(options, self.environment(settings))
            shown = output.decode(errors="replace")[:_SHOWN_VERSION_CHARACTERS]
            parts.append(KeyPart.text("command.version", shown))
            parts.append(KeyPart.digest("command.version-output", digest_bytes(output)))
        return parts

    def environment(self, settings: Mapping[str, Json]) -> Mapping[str, str]:
        """Return the variables that the target's `env` names and that are set.

        Raises:
            BadInputError: one of them is not what it was when the target was resolved.
        """
        found: dict[str, str] = {}
        for name, digest in Settings.of(settings).env.items():
            value = os.environ.get(name)
            if (None if value is None else digest_bytes(os.fsencode(value))) != digest:
                raise BadInputError(
                    f"the environment variable {name} has changed since the target was resolved: run again",
                    reason="environment-changed",
                )
            if value is not None:
                found[name] = value
        return found

    def compile(self, request: CompileRequest) -> Mapping[str, bytes]:
        """Run the compiler on the payload and return the files that it wrote. All that it prints goes to stdout.

        Raises:
            CompileFailedError: the compiler cannot be started, exits with another code than 0, ends by a signal,
                prints what a failure pattern matches, or leaves an output out or empty.
            BadInputError: the payload is not a file's.
        """
        options = Settings.of(request.settings)
        suffix, data = unpack_file(request.payload)
        work = request.folder / "work"
        (work / _OUTPUT_FOLDER).mkdir(parents=True)
        source = f"input{suffix}"
        (work / source).write_bytes(data)
        values = {"input": source, "output": f"{_OUTPUT_FOLDER}/{options.output_name}", "output_dir": _OUTPUT_FOLDER}
        argv = [fill_in(argument, values) for argument in options.argv]
        log = CompilerLog(options.failure_patterns, echo=True)
        environment = _environment(request.folder, self.environment(request.settings))
        try:
            code = run(argv, folder=work, environment=environment, log=log)
        except NotStartedError as error:
            reason = "not-started" if error.retryable else "compiler-error"
            raise CompileFailedError(str(error), reason=reason, retryable=error.retryable) from error
        _refuse_failure(argv[0], code, log)
        return _collect(work / _OUTPUT_FOLDER, options.outputs, log)

    def load(
        self, settings: Mapping[str, Json], outputs: Mapping[str, bytes], devices: Sequence[Any] | None
    ) -> "CommandArtifact":
        """Return the files that the compiler made. What they mean is the trainer's to know.

        Raises:
            BadInputError: `devices` are given, which files cannot be bound to.
        """
        del settings  # The files stand for themselves.
        if devices is not None:
            raise BadInputError(
                "the backend 'command' gives files, which are not bound to devices: leave `devices` out",
                reason="devices-not-supported",
            )
        return CommandArtifact(dict(outputs))


@dataclass(frozen=True)
class CommandArtifact:
    """What a command made.

    Attributes:
        outputs: the bytes of each file by its path below the output folder, with ``/`` between the parts.
    """

    outputs: Mapping[str, bytes]

    def write_to(self, folder: Path) -> dict[str, Path]:
        """Write the files below `folder`, which is made if need be, and return where each of them is.

        Ranks of one host may do it at the same time: a file is there whole or not at all.

        Raises:
            BadInputError: an output's name leads out of `folder`.
            OSError: a file cannot be written.
        """
        written: dict[str, Path] = {}
        for name, data in self.outputs.items():
            parts = PurePosixPath(name).parts
            if not parts or name.startswith("/") or ".." in parts:
                raise BadInputError(f"output name {name!r} leads out of the folder", reason="bad-output-name")
            path = folder.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{uuid4().hex}.tmp")
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            written[name] = path
        return written


def _environment(folder: Path, allowed: Mapping[str, str]) -> dict[str, str]:
    """Return all that the compiler sees: the same on every host but for PATH, and folders of its own."""
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    fixed = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "LC_ALL": "C.UTF-8",
        # What __DATE__ and the like give: see https://reproducible-builds.org/specs/source-date-epoch/.
        "SOURCE_DATE_EPOCH": "0",
    }
    return fixed | dict(allowed)


def _program_digest(program: str) -> Digest:
    path = Path(program)
    if not (path.is_absolute() and path.is_file()):
        path = tool_path(program)
    try:
        with path.open("rb") as file:
            if file.read(2) != b"#!":
                return digest_file(path)
        # An installer writes the path of its interpreter into a script, and it differs from host to host.
        first, _, rest = path.read_bytes().partition(b"\n")
        interpreter = [Path(os.fsdecode(word)).name for word in first[2:].split()]
        return digest_bytes(os.fsencode(" ".join(interpreter)) + b"\n" + rest)
    except OSError as error:
        raise BadInputError(f"cannot read {str(path)!r}: {error.strerror}", reason="tool-not-found") from error


def _version_output(options: Settings, allowed: Mapping[str, str]) -> bytes:
    log = CompilerLog((), echo=False)
    command = " ".join(options.version_argv)
    advice = "; say in version_argv how its version is asked for, or version_argv = [] not to ask"
    with tempfile.TemporaryDirectory(prefix="graphkiln-") as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir()
        environment = _environment(folder, allowed)
        try:
            code = run(options.version_argv, folder=work, environment=environment, log=log, seconds=_VERSION_SECONDS)
        except NotStartedError as error:
            raise BadInputError(f"{error}{advice}", reason="no-version") from error
        except TimeoutError as error:
            raise BadInputError(
                f"{command!r} took more than {_VERSION_SECONDS:g} s{advice}", reason="no-version"
            ) from error
    if code != 0:
        raise BadInputError(f"{command!r} {ending(code)}{advice}\n{log.summary()}", reason="no-version")
    return log.tail


def _refuse_failure(program: str, code: int, log: CompilerLog) -> None:
    name = Path(program).name
    if code != 0:
        raise _failure(f"{name} {ending(code)}:\n{log.summary()}", reason_of(code), log)
    if log.matched is not None:
        pattern, line = log.matched
        what = f"{name} exited with code 0, but the failure pattern {pattern!r} matches its output:\n  {line}"
        raise _failure(what, "compiler-error", log)


def _collect(folder: Path, patterns: Sequence[str], log: CompilerLog) -> dict[str, bytes]:
    outputs: dict[str, bytes] = {}
    for pattern in patterns:
        found = [path for path in folder.glob(pattern) if path.is_file()]
        if not found:
            raise _no_output(f"left no file {pattern!r}", log)
        for path in found:
            name = path.relative_to(folder).as_posix()
            # A link could lead to any file of the host; an odd name cannot be stored.
            if not path.resolve().is_relative_to(folder.resolve()):
                raise _no_output(f"made {name!r} a link that leads out of its output folder", log)
            if not name.isprintable():
                raise _no_output(f"gave an output the name {name!r}, which is not printable", log)
            outputs[name] = path.read_bytes()
            if not outputs[name]:
                raise _no_output(f"left the output {name!r} empty", log)
    return dict(sorted(outputs.items()))


def _no_output(what: str, log: CompilerLog) -> CompileFailedError:
    return _failure(f"the compiler exited with code 0, but {what}:\n{log.summary()}", "no-output", log)


def _failure(message: str, reason: str, log: CompilerLog) -> CompileFailedError:
    reason = log.outside_reason or reason
    return CompileFailedError(message, reason=reason, retryable=reason in ("killed", "disk-full"))
