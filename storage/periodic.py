"""A thread that does something again and again, such as renewing what expires."""

import threading
from collections.abc import Callable


class Periodic:
    """Calls a function every so often once it was started, until it is closed."""

    def __init__(self, seconds: float, function: Callable[[], None], name: str) -> None:
        """Prepare the thread.

        Args:
            seconds: between two calls, and before the first.
            function: what to call; it handles its own errors.
            name: the thread's name.
        """
        self._seconds, self._function, self._name = seconds, function, name
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it has been started or closed."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        with self._lock:
            if self._thread is not None:
                self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            self._function()
