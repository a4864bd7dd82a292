"""The child: reads jobs from a socket, has an adapter do them, and writes the answers.

File descriptors 1 and 2 lead to the log of the job at hand, so that what C++ code and grandchildren print is kept
as well. The framework is imported by the adapter, not here.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

from graphkiln.storage.errors import BadInputError, CompileFailedError, GraphKilnError
from graphkiln.tasks.contracts import Backend, CompileRequest, KernelGraph, ParseRequest
from graphkiln.tasks.registry import load_backend, load_frontend
from graphkiln.tasks.sandbox.lifeline import tie_to_parent
from graphkiln.tasks.sandbox.outcome import FailureReason
from graphkiln.tasks.sandbox.protocol import (
    Answer,
    Compiled,
    CompileOrder,
    Failed,
    GraphHeader,
    Parsed,
    ParseOrder,
    ProtocolError,
    Started,
    receive,
    send,
)

_PR_SET_CHILD_SUBREAPER = 36
_OOM_SCORE = 500
_MAX_MESSAGE_CHARACTERS = 20_000
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(channel: int, lifeline: int) -> None:
    """Serve jobs from the socket `channel` until its other end closes; end with the writer of `lifeline`."""
    for descriptor in (channel, lifeline):
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    tie_to_parent(lifeline)
    _prepare_process()
    backends: dict[str, Backend] = {}
    with socket.socket(fileno=channel) as connection, contextlib.suppress(EOFError):
        while True:
            _serve_one(connection, backends)
    # A thread of the compiler that still runs must not keep this process.
    os._exit(0)


def _prepare_process() -> None:
    # Descendants whose parent ends become ours, not init's: the pool still finds, measures and ends them.
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # A compiler of many gigabytes that crashes would spend minutes on a core file nobody asked for.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Where memory runs short, the kernel is to take the compiler, not the trainer. A wish: a container may forbid it.
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        score.write_text(str(max(_OOM_SCORE, int(score.read_text()))))


def _serve_one(channel: socket.socket, backends: dict[str, Backend]) -> None:
    """Do one job. A function of its own, so that nothing of one job's payload and outputs lives on into the next."""
    order, blobs = receive(channel, sys.maxsize)
    if not isinstance(order, ParseOrder | CompileOrder):
        raise ProtocolError(f"{order} is no order")
    send(channel, Started())
    _reset_peak_memory()
    with _log_to(order.log):
        result, outputs = _perform(order, blobs, backends)
    send(channel, Answer(result, _peak_memory(), clean=_reap_descendants()), outputs)


def _perform(
    order: ParseOrder | CompileOrder, blobs: Sequence[bytes], backends: dict[str, Backend]
) -> tuple[Parsed | Compiled | Failed, Sequence[bytes]]:
    try:
        if isinstance(order, ParseOrder):
            graphs = _parse(order)
            headers = [GraphHeader(graph.name, graph.payload_format, graph.ranks) for graph in graphs]
            return Parsed(headers), [graph.payload for graph in graphs]
        if order.adapter not in backends:
            backends[order.adapter] = load_backend(order.adapter)
        outputs = _compile(backends[order.adapter], order, *blobs)
        return Compiled(list(outputs)), list(outputs.values())
    except BaseException as error:  # noqa: BLE001  an adapter may raise anything, SystemExit too
        # Errors of the family say what is wrong by themselves, unless they stand for another: the user's own.
        if not isinstance(error, GraphKilnError) or error.__cause__ is not None:
            traceback.print_exc()
        return _failure(error), []


def _parse(order: ParseOrder) -> Sequence[KernelGraph]:
    if not Path(order.folder).is_dir():
        raise BadInputError(f"the network's folder {order.folder} does not exist", reason="missing-folder")
    # What a network opens by a relative path does not depend on where the command was given.
    os.chdir(order.folder)
    request = ParseRequest(order.network, order.folder, order.entrypoint, order.parameters, order.platform)
    graphs = list(load_frontend(order.adapter).parse(request))
    for graph in graphs:
        if not isinstance(graph, KernelGraph) or not isinstance(graph.payload, bytes):
            raise TypeError(f"frontend {order.adapter} gave {type(graph).__name__}, not kernel graphs")
    return graphs


def _compile(backend: Backend, order: CompileOrder, payload: bytes) -> Mapping[str, bytes]:
    folder = Path(order.folder)
    folder.mkdir()
    request = CompileRequest(order.graph, payload, order.payload_format, order.settings, folder)
    outputs = backend.compile(request)
    if not isinstance(outputs, Mapping):
        raise TypeError(f"backend {order.adapter} gave {type(outputs).__name__}, not named outputs")
    for name, content in outputs.items():
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise TypeError(f"backend {order.adapter} gave output {name!r} as {type(content).__name__}, not bytes")
    return outputs


def _failure(error: BaseException) -> Failed:
    message = _message(error)
    if isinstance(error, BadInputError):
        return Failed("bad-input", message, error.reason)
    if isinstance(error, CompileFailedError) and error.reason in get_args(FailureReason):
        return Failed(cast(FailureReason, error.reason), message)
    if isinstance(error, MemoryError):
        return Failed("out-of-memory", message)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failed("disk-full", message)
    return Failed("compiler-error", message)


def _message(error: BaseException) -> str:
    """Return the error's own words, after its type if they are none or one, as of ``KeyError('x')``."""
    text = str(error).strip()
    if len(text) > _MAX_MESSAGE_CHARACTERS:
        text = f"{text[:_MAX_MESSAGE_CHARACTERS]}... (the log has it whole)"
    if len(text.split()) < 2:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def _log_to(path: str) -> Iterator[None]:
    """Lead file descriptors 1 and 2 to the file at `path` for the time of the block."""
    before = os.dup(1), os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _lead(log, log)
    try:
        yield
    finally:
        # What the buffers of Python and C still hold belongs to this job, not to the next.
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        _LIBC.fflush(None)
        _lead(*before)


def _lead(out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in {out, err}:
        os.close(descriptor)


def _reap_descendants() -> bool:
    """Wait for descendants that have ended; tell whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _reset_peak_memory() -> None:
    # A container may forbid it; then the peak is that of the child's whole life.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_memory() -> int:
    status = Path("/proc/self/status").read_text()
    kibibytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kibibytes) * 1024
