"""A pool of child processes that parse networks and compile kernel graphs."""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from graphkiln.storage.signing_keys import SIGNING_KEY
from graphkiln.tasks.contracts import KernelGraph, ParseRequest
from graphkiln.tasks.sandbox.child import Child
from graphkiln.tasks.sandbox.job import ChildGoneError, Decode, Job
from graphkiln.tasks.sandbox.limits import Limits
from graphkiln.tasks.sandbox.monitor import Monitor
from graphkiln.tasks.sandbox.outcome import (
    ChildBadInputError,
    ChildFailedError,
    ChildResult,
    CompileJob,
    FailureReason,
    Usage,
)
from graphkiln.tasks.sandbox.protocol import Compiled, CompileOrder, Order, Parsed, ParseOrder, ProtocolError
from graphkiln.tasks.sandbox.scratch import Scratch, remove_folder

__all__ = ["ChildBadInputError", "ChildFailedError", "ChildPool", "ChildResult", "CompileJob"]

# What compile children get of the parent's environment. PYTHONPATH and PYTHONHOME are not among it: a module that is
# imported as the interpreter starts (sitecustomize) could change what is compiled, and the key would not tell.
_INHERITED = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LANGUAGE",
        "TZ",
        "LD_LIBRARY_PATH",
    }
)
_ALWAYS = {"PYTHONUNBUFFERED": "1"}
_ALWAYS_COMPILING = {**_ALWAYS, "PYTHONHASHSEED": "0"}
_LOG = "log"
_NOTHING = Usage(b"", 0.0, 0)
# How long calls in flight may take to notice that their children are gone.
_CLOSE_SECONDS = 20.0

ValueT = TypeVar("ValueT")
MakeOrder: TypeAlias = Callable[[Path], Order]


class ChildPool:
    """Children that serve one environment, at most `jobs` at once. Close it, or use it with `with`.

    All methods may be called from any thread. The calls block; an exception that is raised in a waiting thread, such
    as KeyboardInterrupt, ends the job it waits for.
    """

    def __init__(self, *, environment: Mapping[str, str], jobs: int, limits: Limits) -> None:
        """Make a pool without children; they are started when they are wanted.

        Args:
            environment: what compile children have in their environment, besides a few variables of the parent: the
                user, the language, PATH and LD_LIBRARY_PATH. The interpreter may need the last one to start; like
                PATH, and HOME with what is installed below it, it can change what is loaded, and no key holds it.
                What only the parent's sys.path leads to is found after what is installed. Parse children have the
                whole environment of the parent instead, as the user's network may read it, but no signing key.
            jobs: how many children there are at most.
            limits: what each job may use.

        Raises:
            ChildFailedError: there can be no folder for temporary files.
        """
        self._environment = dict(environment)
        self._jobs = jobs
        self._limits = limits
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._idle: list[Child] = []
        self._children: set[Child] = set()
        self._slots_taken = 0
        self._closed = False
        self._cleaning = threading.Lock()
        self._cleaner: int | None = None
        self._ended = False
        with _disk_errors():
            self._scratch = Scratch()
        self._monitor = Monitor(limits)
        # Children are started by one thread that lives as long as the pool, since some systems tie a child to the
        # thread that started it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="graphkiln-starter")

    def __enter__(self) -> "ChildPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def parse(self, frontend: str, request: ParseRequest) -> ChildResult[list[KernelGraph]]:
        """Have a frontend parse a network in a child of its own, whose working directory is the request's folder.

        Raises:
            ChildBadInputError: the frontend refuses the network, or there is no such frontend.
            ChildFailedError: it failed in any other way.
        """

        def order(folder: Path) -> ParseOrder:
            return ParseOrder(
                adapter=frontend,
                log=str(folder / _LOG),
                network=request.network,
                folder=request.folder,
                entrypoint=request.entrypoint,
                parameters=request.parameters,
                platform=request.platform,
            )

        with self._slot():
            # The network's own Python needs no secret of the user's.
            environment = {name: value for name, value in os.environ.items() if name != SIGNING_KEY}
            child = self._start(frontend, {**environment, **_ALWAYS})
            return self._run(child, order, (), _graphs, reuse=False)

    def compile(self, backend: str, request: CompileJob) -> ChildResult[dict[str, bytes]]:
        """Have a backend compile a kernel graph, in a child that has done so before or in a new one.

        Raises:
            ChildBadInputError: the backend refuses the kernel graph, or there is no such backend.
            ChildFailedError: it failed in any other way.
        """

        def order(folder: Path) -> CompileOrder:
            return CompileOrder(
                adapter=backend,
                log=str(folder / _LOG),
                graph=request.graph,
                payload_format=request.payload_format,
                settings=dict(request.settings),
                folder=str(folder / "work"),
            )

        with self._slot():
            result = self._compile(backend, order, request.payload)
        if not result.value or not all(result.value.values()):
            empty = [name for name, content in result.value.items() if not content]
            message = f"the backend made an empty output: {', '.join(empty)}" if empty else "the backend made no output"
            raise ChildFailedError(message, reason="no-output", usage=result)
        return result

    def close(self) -> None:
        """Kill all children with their descendants, wait for them, and remove their files.

        Calls in flight raise `ChildFailedError` with the reason ``interrupted``. Closing again waits for a call that
        is at it, goes on with what an interrupted call left, and else does nothing.
        """
        # A fork of the parent that unwinds its stack must not end children that are not its own.
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._closed = True
            self._idle = []
            self._changed.notify_all()
        if self._cleaner == threading.get_ident():
            return  # a signal handler has interrupted the very call that cleans up, which goes on afterwards
        # One at a time. Where an interrupt ends a clean-up half-way, the next call does it again.
        with self._cleaning:
            try:
                self._cleaner = threading.get_ident()
                if not self._ended:
                    self._end_all()
                    self._ended = True
            finally:
                self._cleaner = None

    def _end_all(self) -> None:
        with self._changed:
            children = list(self._children)
        for child in children:
            child.kill()
        with self._changed:
            self._changed.wait_for(lambda: not self._slots_taken, timeout=_CLOSE_SECONDS)
        self._starter.shutdown()
        self._monitor.close()
        for child in children:
            child.end()
        self._scratch.close()

    def _compile(self, backend: str, order: MakeOrder, payload: bytes) -> ChildResult[dict[str, bytes]]:
        used = self._take_idle(backend)
        if used is not None:
            try:
                return self._run(used, order, (payload,), _outputs, reuse=True)
            except ChildGoneError:
                pass  # it died while it was idle; a new one has not heard of the job either
            except ChildFailedError as error:
                # What earlier jobs left in the child's memory must not decide whether this one succeeds.
                if error.reason != "out-of-memory":
                    raise
        return self._run(self._start(backend, self._compile_environment()), order, (payload,), _outputs, reuse=True)

    def _run(
        self, child: Child, order: MakeOrder, blobs: Sequence[bytes], decode: Decode[ValueT], *, reuse: bool
    ) -> ChildResult[ValueT]:
        folder = child.folder / f"job-{next(self._numbers)}"
        keep = False
        try:
            with _disk_errors():
                folder.mkdir()
                (folder / _LOG).touch()
            job = Job(child, folder / _LOG, self._limits, self._monitor)
            result = job.run(order(folder), blobs, decode)
            keep = reuse and job.clean
            return result
        except ChildFailedError as error:
            if self._closed and error.reason in ("killed", "crashed"):
                raise _interrupted(error) from error
            raise
        finally:
            if keep:
                remove_folder(folder)
                self._park(child)
            else:
                self._discard(child)

    def _start(self, adapter: str, environment: Mapping[str, str]) -> Child:
        with self._changed:
            surplus = self._idle[: max(0, self._slots_taken + len(self._idle) - self._jobs)]
            del self._idle[: len(surplus)]
        for child in surplus:
            self._discard(child)
        starting = self._starter.submit(self._start_child, adapter, environment)
        try:
            with _disk_errors():
                return starting.result()
        except BaseException:
            starting.add_done_callback(self._discard_started)
            raise

    def _start_child(self, adapter: str, environment: Mapping[str, str]) -> Child:
        child = Child(self._scratch.path / f"child-{next(self._numbers)}", adapter, environment)
        with self._changed:
            self._children.add(child)
            if not self._closed:
                return child
        self._discard(child)
        raise _interrupted()

    def _discard_started(self, starting: "Future[Child]") -> None:
        if starting.exception() is None:
            self._discard(starting.result())

    def _take_idle(self, adapter: str) -> Child | None:
        while True:
            with self._changed:
                # The one that was used last: its memory is the warmest.
                child = next((child for child in reversed(self._idle) if child.adapter == adapter), None)
                if child is None:
                    return None
                self._idle.remove(child)
            if not child.has_exited():
                return child
            self._discard(child)

    def _park(self, child: Child) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(child)
                return
        self._discard(child)

    def _discard(self, child: Child) -> None:
        child.end()
        with self._changed:
            self._children.discard(child)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._slots_taken < self._jobs)
            if self._closed:
                raise _interrupted()
            self._slots_taken += 1
        try:
            yield
        finally:
            with self._changed:
                self._slots_taken -= 1
                self._changed.notify_all()

    def _compile_environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith("LC_")}
        return {**inherited, **_ALWAYS_COMPILING, **self._environment}


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn what the system refuses before a job begins into the error of that job."""
    try:
        yield
    except OSError as error:
        reason: FailureReason = "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "not-started"
        raise ChildFailedError(f"no child could be started: {error}", reason=reason, usage=_NOTHING) from error


def _interrupted(ending: ChildFailedError | None = None) -> ChildFailedError:
    usage = _NOTHING if ending is None else Usage(ending.log, ending.seconds, ending.peak_memory_bytes)
    return ChildFailedError("it was ended because the run was", reason="interrupted", usage=usage)


def _graphs(result: Parsed | Compiled, payloads: list[bytes]) -> list[KernelGraph]:
    if not isinstance(result, Parsed) or len(result.graphs) != len(payloads):
        raise ProtocolError("it does not hold kernel graphs")
    return [
        KernelGraph(graph.name, payload, graph.payload_format, graph.ranks)
        for graph, payload in zip(result.graphs, payloads, strict=True)
    ]


def _outputs(result: Parsed | Compiled, outputs: list[bytes]) -> dict[str, bytes]:
    if not isinstance(result, Compiled) or len(result.names) != len(outputs):
        raise ProtocolError("it does not hold outputs")
    return dict(zip(result.names, outputs, strict=True))
