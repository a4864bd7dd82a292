"""A frontend and a backend that do what a test asks for. The tests install this file as a third-party package."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from graphkiln.storage.errors import BadInputError, CompileFailedError
from graphkiln.storage.ranks import RankSet
from graphkiln.tasks.contracts import CompileRequest, KernelGraph, ParseRequest

# A grandchild that outlives what started it, in a session of its own.
_DAEMON = [sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"]
_kept: list[Any] = []


def _echo(request: CompileRequest) -> dict[str, bytes]:
    print(f"compiling {request.graph} as {request.payload_format}")
    (request.folder / "temporary").write_bytes(request.payload)
    return {"payload": request.payload, "pid": str(os.getpid()).encode()}


def _environment(request: CompileRequest) -> dict[str, bytes]:
    lines = [f"{name}={value}" for name, value in sorted(os.environ.items())]
    return {"environment": "\n".join(lines).encode(), "folder": str(request.folder).encode()}


def _imports(request: CompileRequest) -> dict[str, bytes]:
    import graphkiln

    path = "\n".join(sys.path)
    return {
        "graphkiln": str(graphkiln.__file__).encode(),
        "path": path.encode(),
        "modules": " ".join(sys.modules).encode(),
    }


def _big(request: CompileRequest) -> dict[str, bytes]:
    return {"big": bytes([7]) * int(str(request.settings["bytes"]))}


def _nothing(request: CompileRequest) -> dict[str, bytes]:
    return {}


def _empty(request: CompileRequest) -> dict[str, bytes]:
    return {"code": b"x", "constants": b""}


def _text(request: CompileRequest) -> Any:
    return {"code": "text"}


def _raise(request: CompileRequest) -> NoReturn:
    print("about to fail", file=sys.stderr)
    raise ValueError("shapes (3, 4) and (5,) do not match")


def _key_error(request: CompileRequest) -> NoReturn:
    raise KeyError("axis")


def _bad_input(request: CompileRequest) -> NoReturn:
    print("looking at the options")
    raise BadInputError("the option tiles is 3, but must be a power of two", reason="bad-tiles")


def _own_reason(request: CompileRequest) -> NoReturn:
    raise CompileFailedError("the compiler wrote no file below out/", reason="no-output")


def _bad_input_of_user(request: CompileRequest) -> NoReturn:
    try:
        raise ZeroDivisionError("in the user's own code")
    except ZeroDivisionError as error:
        raise BadInputError(f"the entrypoint raised {error!r}", reason="bad-entrypoint") from error


def _system_exit(request: CompileRequest) -> NoReturn:
    sys.exit(3)


def _no_space(request: CompileRequest) -> NoReturn:
    raise OSError(28, "No space left on device", "/scratch/x")


def _memory_error(request: CompileRequest) -> NoReturn:
    raise MemoryError("cannot have 3 TiB")


def _exit(request: CompileRequest) -> NoReturn:
    print("leaving", flush=True)
    os._exit(0)


def _fill_disk(request: CompileRequest) -> NoReturn:
    """Fill the disk of the temporary files, and end as an interpreter does that cannot write its log."""
    with Path(tempfile.gettempdir(), "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            os._exit(1)
    raise AssertionError


def _kill_self(request: CompileRequest) -> NoReturn:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _segfault(request: CompileRequest) -> NoReturn:
    ctypes.string_at(0)
    raise AssertionError


def _garbage(request: CompileRequest) -> dict[str, bytes]:
    os.write(_channel(), b"what is this? " * 10)
    return {"code": b"x"}


def _announces_too_much(request: CompileRequest) -> NoReturn:
    from graphkiln.tasks.sandbox.protocol import _ENCODER, _MAGIC, _PREFIX, Answer, Compiled, _Header

    header = _ENCODER.encode(_Header(Answer(Compiled(["x"]), 1, clean=True), [2**40]))
    with socket.socket(fileno=_channel()) as channel:
        channel.sendall(_PREFIX.pack(_MAGIC, len(header)) + header)
        while True:
            channel.sendall(bytes(2**20))


def _channel() -> int:
    return next(fd for fd, target in _open_descriptors().items() if target.startswith("socket:"))


def _open_descriptors() -> dict[int, str]:
    entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return {int(entry.name): str(entry.readlink()) for entry in entries if int(entry.name) > 2}


def _descriptors(request: CompileRequest) -> dict[str, bytes]:
    program = "import os; print([fd for fd in range(3, 100) if os.path.exists(f'/proc/self/fd/{fd}')])"
    grandchild = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, close_fds=False)
    return {"own": "\n".join(_open_descriptors().values()).encode(), "grandchild": grandchild.stdout.strip()}


def _close_connection(request: CompileRequest) -> NoReturn:
    os.close(_channel())
    time.sleep(600)
    raise AssertionError


def _hang(request: CompileRequest) -> NoReturn:
    print("hanging", flush=True)
    _tell(request)
    time.sleep(600)
    raise AssertionError


def _hang_with_gil(request: CompileRequest) -> NoReturn:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    _tell(request)
    ctypes.PyDLL(None).sleep(600)
    raise AssertionError


def _hang_with_signals_blocked(request: CompileRequest) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _hang(request)


def _memory(request: CompileRequest) -> NoReturn:
    _kept.append(b"\x01" * (300 * 2**20))
    time.sleep(600)
    raise AssertionError


def _keep_memory(request: CompileRequest) -> dict[str, bytes]:
    _kept.append(b"\x01" * (60 * 2**20))
    time.sleep(0.3)
    return {"pid": str(os.getpid()).encode()}


def _forks_share_memory(request: CompileRequest) -> dict[str, bytes]:
    shared = b"\x01" * (80 * 2**20)
    forks = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            time.sleep(0.5)
            os._exit(len(shared) % 2)
        forks.append(pid)
    for pid in forks:
        os.waitpid(pid, 0)
    return {"code": b"x"}


def _memory_in_daemon(request: CompileRequest) -> NoReturn:
    program = "import os, time; os.setsid(); x = b'1' * (300 * 2**20); time.sleep(600)"
    subprocess.run(["/bin/sh", "-c", '"$0" -c "$1" &', sys.executable, program], check=True)
    time.sleep(600)
    raise AssertionError


def _flood(request: CompileRequest) -> NoReturn:
    os.write(1, b"the first line\n")
    for _ in range(100):
        os.write(1, b"x" * 2**20)
    os.write(1, b"\nthe last line\n")
    time.sleep(600)
    raise AssertionError


def _short_flood(request: CompileRequest) -> dict[str, bytes]:
    os.write(1, b"x" * (3 * 2**20))
    return {"code": b"x"}


def _prints(request: CompileRequest) -> dict[str, bytes]:
    print("python says", request.graph)
    print("python warns of", request.graph, file=sys.stderr)
    ctypes.CDLL(None).printf(b"C says %s\n", request.graph.encode())
    subprocess.run(["/bin/echo", "grandchild says", request.graph], check=True)
    return {"code": b"x"}


def _daemon(request: CompileRequest) -> dict[str, bytes]:
    process = subprocess.Popen(_DAEMON)
    return {"pid": str(os.getpid()).encode(), "daemon": str(process.pid).encode()}


def _orphan(request: CompileRequest) -> dict[str, bytes]:
    """As `_daemon`, but its parent is gone as well."""
    shell = ["/bin/sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 & echo $!', sys.executable, _DAEMON[2]]
    return {"daemon": subprocess.run(shell, check=True, capture_output=True).stdout.strip()}


def _daemon_then_crash(request: CompileRequest) -> NoReturn:
    """As soon as the daemon has left the session, before the monitor is likely to have seen it there."""
    with subprocess.Popen(
        [*_DAEMON[:2], _DAEMON[2].replace("time.sleep", "print(flush=True); time.sleep")], stdout=subprocess.PIPE
    ) as process:
        Path(str(request.settings["tell"])).write_text(f"{os.getpid()} {process.pid}")
        assert process.stdout is not None
        process.stdout.readline()
        os.abort()


def _fork_holds_socket(request: CompileRequest) -> NoReturn:
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)


def _leave_file(request: CompileRequest) -> dict[str, bytes]:
    (Path(tempfile.gettempdir()) / "left-behind").write_text("x")
    return {"tmp": tempfile.gettempdir().encode(), "cwd": str(Path.cwd()).encode()}


def _times(request: CompileRequest) -> dict[str, bytes]:
    start = time.monotonic()
    time.sleep(0.2)
    return {"span": f"{start} {time.monotonic()}".encode(), "pid": str(os.getpid()).encode()}


def _tell(request: CompileRequest) -> None:
    """Let the test know that the job is under way, and by which process."""
    path = Path(str(request.settings["tell"]))
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


class MisbehavingBackend:
    name: ClassVar[str] = "misbehaving"

    def compile(self, request: CompileRequest) -> Mapping[str, bytes]:
        do: Callable[[CompileRequest], Mapping[str, bytes]] = globals()[f"_{request.settings['do']}"]
        return do(request)


class MisbehavingFrontend:
    name: ClassVar[str] = "misbehaving"

    def parse(self, request: ParseRequest) -> Sequence[KernelGraph]:
        print("parsing", request.network)
        match request.entrypoint:
            case "pid":
                payload = str(os.getpid()).encode()
            case "environment":
                names = ("SANDBOX_TEST", "GRAPHKILN_SIGNING_KEY")
                payload = ",".join(os.environ.get(name, "none") for name in names).encode()
            case "cwd":
                payload = os.fsencode(Path.cwd())
            case "raise":
                raise BadInputError("entrypoint x.py:y does not exist", reason="bad-entrypoint")
            case "wrong":
                return ["no graph"]  # type: ignore[list-item]
            case "crash":
                os.abort()
            case other:
                payload = other.encode()
        graph = KernelGraph("stage-0", payload, "fake/1", RankSet.parse("0-15,32"))
        return [graph, KernelGraph("stage-1", repr(request.parameters).encode(), "fake/1", RankSet.parse("16"))]
