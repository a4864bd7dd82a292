"""One child process, seen from its parent."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

import graphkiln
from graphkiln.tasks.sandbox.scratch import remove_folder
from graphkiln.tasks.sandbox.tree import ProcessTable, kill_tree, wait_ended

_LOGGER = logging.getLogger(__name__)

# Where the system cannot end a process (it hangs in a file system), the pool goes on without it.
_END_SECONDS = 10.0
_POLL_SECONDS = 0.005
_MARK = "GRAPHKILN_CHILD"

# Makes the very package that the parent runs, wherever it was imported from, without putting the folder that holds
# it on the path: in a source tree that folder has `tasks/` and `tests/`. What the parent can import besides is
# found last, so that it shadows nothing.
_BOOT = """
import importlib.util, sys
package, channel, lifeline, *path = sys.argv[1:]
del sys.argv[1:]
sys.path.extend(entry for entry in path if entry not in sys.path)
spec = importlib.util.spec_from_file_location("graphkiln", package)
sys.modules["graphkiln"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from graphkiln.tasks.sandbox.worker import main
main(int(channel), int(lifeline))
"""


class Child:
    """A child process that serves jobs from its channel. All methods may be called from any thread.

    Attributes:
        folder: the child's own folder, working directory and TMPDIR; removed when it has ended.
        channel: the socket on which it takes jobs and gives answers.
        adapter: the adapter it serves; it stays with the first one, since two frameworks may not share a process.
        used: whether it has done a job.
        tree: the child and its descendants as the monitor saw them last.
    """

    def __init__(self, folder: Path, adapter: str, environment: Mapping[str, str]) -> None:
        """Start a child with this environment, but its own TMPDIR and a mark that its descendants inherit.

        Raises:
            OSError: the system refuses: too many processes, no memory, no disk.
        """
        self.folder = folder
        self.adapter = adapter
        self.used = False
        self.tree: set[psutil.Process] = set()
        self._lock = threading.Lock()
        self._ended = False
        folder.mkdir()
        with contextlib.ExitStack() as undo:
            undo.callback(remove_folder, folder)
            self.channel, its_channel = socket.socketpair()
            undo.callback(self.channel.close)
            its_lifeline, self._lifeline = os.pipe()
            undo.callback(os.close, self._lifeline)
            with its_channel, os.fdopen(its_lifeline), self.start_log.open("wb") as log:
                self._process = subprocess.Popen(
                    _command(its_channel.fileno(), its_lifeline),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    env={**environment, "TMPDIR": str(folder), _MARK: str(folder)},
                    pass_fds=(its_channel.fileno(), its_lifeline),
                    start_new_session=True,
                )
            self._undo = undo.pop_all()

    @property
    def pid(self) -> int:
        """The process id, which is also that of its process group and session."""
        return self._process.pid

    @property
    def start_log(self) -> Path:
        """What the child wrote outside any job, as when it could not start."""
        return self.folder / "start.log"

    def has_exited(self) -> bool:
        """Tell whether the process has ended. It is not waited for, so that its number stays its own."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def exits_within(self, seconds: float) -> bool:
        """Tell whether the process has ended by itself at most `seconds` from now."""
        deadline = time.monotonic() + seconds
        while not self.has_exited():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def kill(self) -> None:
        """Kill the child and its descendants, and wake who waits for its answer."""
        with self._lock:
            if not self._ended:
                if self._process.returncode is None:
                    self._kill_tree()
                # An `end` that was interrupted may have closed it.
                with contextlib.suppress(OSError):
                    self.channel.shutdown(socket.SHUT_RDWR)

    def end(self) -> int | None:
        """Kill the child and its descendants, wait for it and remove what it had.

        Where an exception interrupts it, the next call goes on.

        Returns:
            The exit code as `subprocess` has it: the negative number of the signal if it was one; None if the
            system has not ended the process.
        """
        with self._lock:
            if not self._ended:
                # Once it has been waited for, its number may be another process's.
                if self._process.returncode is None:
                    self._end_tree()
                self._undo.close()
                # What an interrupted call had begun to remove.
                remove_folder(self.folder)
                self._ended = True
            return self._process.returncode

    def _end_tree(self) -> None:
        # A child that has gone by itself keeps the exit code it had.
        ended = wait_ended(self._kill_tree(), _END_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS if ended else 0)
        if not ended:
            _LOGGER.warning("child %d was killed, but the system has not ended it and all below it", self.pid)

    def _kill_tree(self) -> set[psutil.Process]:
        known = self.tree
        if self.has_exited():
            # Its descendants are somebody else's by now, but have its environment.
            known = known | ProcessTable().marked(_MARK, str(self.folder))
        return kill_tree(self.pid, known)


def _command(channel: int, lifeline: int) -> list[str]:
    package = str(Path(graphkiln.__file__).absolute())
    path = [entry for entry in sys.path if Path(entry).is_absolute()]
    # -P: what lies in the working directory is not imported. faulthandler: a crash leaves a traceback in the log.
    return [sys.executable, "-P", "-X", "faulthandler", "-c", _BOOT, package, str(channel), str(lifeline), *path]
