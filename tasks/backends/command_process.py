"""Runs a compiler and reads what it prints, in bounded memory."""

import contextlib
import errno
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_CHUNK_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024
_LINE_BYTES = 64 * 1024
_POLL_SECONDS = 0.5
_SHOWN_LINES = 8
_SHOWN_CHARACTERS = 500

_TELLING = re.compile(rb"[Ee]rror\b|ERROR|[Ff]atal|FATAL|\bE[A-Z0-9]\d{4}\b|No space left on device")
# What compilers say of troubles that come from outside, though they exit in the ordinary way.
_OUTSIDE_REASONS = {b"No space left on device": "disk-full", b"Killed signal terminated program": "killed"}
_OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# What a shell returns for a program that signal n has ended is this plus n.
_SHELL_SIGNAL_BASE = 128


class NotStartedError(Exception):
    """A program could not be started.

    Attributes:
        retryable: whether it is for want of processes or memory.
    """

    def __init__(self, program: str, error: OSError) -> None:
        super().__init__(f"cannot start {program!r}: {error.strerror}")
        self.retryable = error.errno in (errno.EAGAIN, errno.ENOMEM)


class CompilerLog:
    """What is kept of a compiler's output: its end, the lines that tell of an error, and what a pattern matched.

    Attributes:
        matched: the failure pattern that matched first, and its line; None as long as there is none.
        outside_reason: ``"disk-full"`` or ``"killed"`` if a line tells that this happened, else None.
    """

    def __init__(self, failure_patterns: Iterable[str], *, echo: bool) -> None:
        """Make an empty log.

        Args:
            failure_patterns: regular expressions to look for, in one line at a time (its first 64 KiB).
            echo: whether to pass everything on to stdout, as it comes.
        """
        self.matched: tuple[str, str] | None = None
        self.outside_reason: str | None = None
        self._patterns = [re.compile(pattern) for pattern in failure_patterns]
        self._echo = echo
        self._tail = bytearray()
        self._telling: list[bytes] = []
        self._line = b""

    @property
    def tail(self) -> bytes:
        """The last bytes of the output, 64 KiB at most."""
        return bytes(self._tail[-_TAIL_BYTES:])

    def feed(self, chunk: bytes) -> None:
        """Take the next piece of output."""
        if self._echo:
            _write_to_stdout(chunk)
        self._tail += chunk
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        *lines, self._line = (self._line + chunk.replace(b"\r", b"\n")).split(b"\n")
        for line in lines:
            self._look_at(line)
        if len(self._line) >= _LINE_BYTES:
            self.end()

    def end(self) -> None:
        """Take what is left as a line."""
        self._look_at(self._line)
        self._line = b""

    def summary(self) -> str:
        """Return the compiler's own words: the first lines that tell of an error, and the last line of all."""
        texts = [line.decode(errors="replace") for line in self._telling]
        last = [text for text in self.tail.decode(errors="replace").splitlines() if any(map(str.isalnum, text))]
        # Without an error, the end tells most; with one, its last line often has the root cause.
        for text in last[-1:] if texts else last[-_SHOWN_LINES:]:
            if text not in texts:
                texts.append(text)
        return "\n".join(f"  {text.rstrip()[:_SHOWN_CHARACTERS]}" for text in texts) or "  (it printed nothing)"

    def _look_at(self, line: bytes) -> None:
        if len(self._telling) < _SHOWN_LINES and _TELLING.search(line):
            self._telling.append(line)
        for words, reason in _OUTSIDE_REASONS.items():
            if words in line:
                self.outside_reason = reason
        if self._patterns and self.matched is None:
            text = line.decode(errors="replace")
            for pattern in self._patterns:
                if pattern.search(text):
                    self.matched = (pattern.pattern, text.strip()[:_SHOWN_CHARACTERS])
                    return


def run(
    argv: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    log: CompilerLog,
    seconds: float | None = None,
) -> int:
    """Run a program to its end, without a shell, and return its exit code; minus n if signal n has ended it.

    Args:
        argv: the program and its arguments.
        folder: where it runs.
        environment: all its environment variables.
        log: takes what it prints on stdout and stderr.
        seconds: how long it may take. None is for children of the sandbox, which has limits of its own and must
            find the program in its own process group.

    Raises:
        NotStartedError: the program cannot be started.
        TimeoutError: it took longer; it and the programs that it started have been killed.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    with _started(argv, folder, environment, own_session=deadline is not None) as process:
        try:
            _follow(process, log, deadline)
            return process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            if deadline is None:
                process.kill()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError from error
            raise


def _started(
    argv: Sequence[str], folder: Path, environment: Mapping[str, str], *, own_session: bool
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=own_session,
        )
    except OSError as error:
        raise NotStartedError(argv[0], error) from error


def _follow(process: subprocess.Popen[bytes], log: CompilerLog, deadline: float | None) -> None:
    assert process.stdout is not None  # noqa: S101  (it is a pipe)
    output = process.stdout.fileno()
    poll = select.poll()
    poll.register(output, select.POLLIN | select.POLLHUP)
    while True:
        if poll.poll(_POLL_SECONDS * 1000):
            chunk = os.read(output, _CHUNK_BYTES)
            if not chunk:
                break
            log.feed(chunk)
        elif process.poll() is not None:
            # A server that the compiler left behind holds the pipe open.
            break
        if deadline is not None and time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, 0)
    log.end()


def ending(code: int) -> str:
    """Say how a program ended: ``"exited with code 1"``, ``"was ended by SIGKILL"``."""
    number = _signal_number(code)
    if number is None:
        return f"exited with code {code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"was ended by {name}" if code < 0 else f"exited with code {code} ({name})"


def reason_of(code: int) -> str:
    """Return why a program failed that ended with `code`: ``"killed"``, ``"crashed"`` or ``"compiler-error"``."""
    number = _signal_number(code)
    if number is None:
        return "compiler-error"
    return "killed" if number in _OUTSIDE_SIGNALS else "crashed"


def _signal_number(code: int) -> int | None:
    if code < 0:
        return -code
    number = code - _SHELL_SIGNAL_BASE
    return number if number in set(signal.Signals) else None


def _write_to_stdout(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
