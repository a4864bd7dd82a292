"""Ties a child to its parent: when the parent ends, however it ends, the child's whole process group is killed.

The child holds the read end of a pipe whose write end nobody but the parent holds. When the parent ends, the
kernel closes the write end, and sends the child's process group the signal that the child asked for: SIGKILL. That
needs no thread and no interpreter, so it reaches a compiler that never lets go of the GIL. A parent-death signal
(PR_SET_PDEATHSIG) would not do: it fires when the *thread* that started the child ends.

A descendant that has left the process group and whose ancestors are killed this way is not reached.
"""

import fcntl
import os
import select
import signal
import threading

_PARENT_CHECK_MS = 500


def tie_to_parent(lifeline: int) -> None:
    """Have this process's group killed when the pipe `lifeline` loses its writer or this process its parent.

    The caller leads its process group.
    """
    parent = os.getppid()
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # The thread sees what no signal tells of: a parent that ended before the lines above, and one whose end left
    # the pipe open because some process that it forked holds the write end too.
    threading.Thread(target=_watch, args=(lifeline, parent), name="graphkiln-lifeline", daemon=True).start()


def _watch(lifeline: int, parent: int) -> None:
    poller = select.poll()
    poller.register(lifeline, 0)  # a hang-up is reported whatever is asked for
    while not poller.poll(_PARENT_CHECK_MS) and os.getppid() == parent:
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
