"""A Prefect server that belongs to one run of the command line, for users who have not set one up.

Prefect has a temporary server of its own, but a run that is killed leaves it behind. This one is tied to its
parent as compilers are, listens on a port that the system chose, and starts before Prefect is imported, so that
the two overlap. It keeps its history in Prefect's usual database.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from graphkiln.storage.errors import BadInputError

START_SECONDS = 180.0
_STOP_SECONDS = 5.0
_REQUEST_SECONDS = 5.0
_POLL_SECONDS = 0.1

# Prefect's own names for a server without its web pages that one run owns.
_ENVIRONMENT = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
# The last line of a traceback.
_EXCEPTION = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception)\w*: .+)$", re.MULTILINE)
# The server is on this host, whatever proxy leads to the others.
_open_directly = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class EmbeddedServer:
    """A server process, starting from the moment this object is made. `stop` it in the end."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the server
        lifeline, self._keep_alive = os.pipe()
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
            passed = (lifeline, listener.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *map(str, passed)],
                pass_fds=passed,
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.close(lifeline)

    def wait_until_ready(self) -> None:
        """Return once the server answers.

        Raises:
            BadInputError: it ended, or has not answered within `START_SECONDS`.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise BadInputError(
                    f"Prefect's embedded server did not start: {self._what_went_wrong()}; mend Prefect's settings, set "
                    "PREFECT_API_URL to a server that runs, or run with --no-prefect",
                    reason="prefect-server",
                )
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End the server and wait until it is gone."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with _open_directly(f"{self.url}/health", timeout=_REQUEST_SECONDS):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _what_went_wrong(self) -> str:
        self._log.seek(0)
        log = self._log.read().decode(errors="replace").strip()
        told = _EXCEPTION.findall(log) or log.splitlines() or ["it printed nothing"]
        return str(told[-1])


def _serve(lifeline: int, listener: int) -> None:
    from graphkiln.tasks.sandbox.lifeline import tie_to_parent

    tie_to_parent(lifeline)
    import uvicorn

    config = uvicorn.Config("prefect.server.api.server:create_app", factory=True, log_level="error", lifespan="on")
    # Before uvicorn takes the signals: until the database is touched, SIGTERM ends this process at once.
    config.load()
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=listener)])


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
