"""Ctrl-C and SIGTERM: they end the run at once, and nothing is left behind."""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """End the children as soon as Ctrl-C or SIGTERM comes: Prefect waits for the tasks, and they for the children.

    A signal that comes just before the main thread begins to wait does not wake it, so that its handler would run
    when the wait is over. A thread that reads Python's wake-up pipe ends the children, and with them the wait.
    """
    interrupted = threading.Event()
    reader, writer = socket.socketpair()
    writer.settimeout(0)  # never wait in a signal handler

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        # A second one would interrupt the clean-up, which takes a moment and leaves nothing behind.
        for number in previous:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    def watch() -> None:
        while received := reader.recv(1):
            if received[0] in previous:
                interrupted.set()
                stop()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="graphkiln-signals", daemon=True)
    watcher.start()
    try:
        yield
        if interrupted.is_set():  # some library has swallowed the exception
            raise KeyboardInterrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        writer.close()
        watcher.join()
        reader.close()
