"""A real HTTP proxy before a real server, which fails the way that networks and busy servers do."""

import contextlib
import http.client
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import unquote, urlsplit

# What may happen to one request. "reply lost" happens after the server has done what it was asked to do.
FAULTS: Final = ("busy", "server fault", "connection dropped", "reply lost", "reply cut")

# A fault that starts like this is an answer of the server, with the rest as its message.
REFUSED: Final = "refused: "

_ANSWERS: Final = {
    "busy": (503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"),
    "server fault": (500, b"<Error><Code>InternalError</Code><Message>We are sorry.</Message></Error>"),
}
_NOT_PASSED_ON: Final = ("transfer-encoding", "connection", "content-length", "date", "server")


# How Google's protocol names what is uploaded.
_UPLOADED: Final = re.compile(rb'{"name":"([^"]*)"}')


class FaultyProxy:
    """Passes requests on, but for those of which `fault` names a fault.

    Attributes:
        url: where it listens.
        fault: is asked of each request, by method and what it is about; set by the test.
        seen: method and status of every request that reached the server, in order.
        asked: method of every request, and what it is about.
    """

    def __init__(self, server: str) -> None:
        self.reset()
        self._host = urlsplit(server).netloc
        self._listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"

    def reset(self) -> None:
        """Pass everything on, and forget what was seen."""
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.seen: list[tuple[str, int]] = []
        self.asked: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator["FaultyProxy"]:
        """Serve in a thread."""
        thread = threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._listener.shutdown()
            self._listener.server_close()
            thread.join()

    def fail_first(self, times: int, fault: str, method: str) -> None:
        """Let the first requests of a method fail."""
        left = [fault] * times
        lock = threading.Lock()

        def decide(asked: str, path: str) -> str | None:
            with lock:
                return left.pop() if asked == method and left else None

        self.fault = decide

    def fail_once_each(self, fault: str, methods: tuple[str, ...]) -> None:
        """Let the first request for each path fail, of these methods."""
        failed: set[tuple[str, str]] = set()
        lock = threading.Lock()

        def decide(method: str, path: str) -> str | None:
            with lock:
                if method not in methods or (method, path) in failed:
                    return None
                failed.add((method, path))
                return fault

        self.fault = decide

    def _handler(proxy) -> type[http.server.BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits 40 ms for the client to acknowledge its head

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def __getattr__(self, name: str) -> Any:
                if name.startswith("do_"):
                    return self.answer
                raise AttributeError(name)

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                target = _target(self.path, body)
                proxy.asked.append((self.command, target))
                fault = proxy.fault(self.command, target)
                if fault == "connection dropped":
                    self.close_connection = True
                elif fault in _ANSWERS or (fault and fault.startswith(REFUSED)):
                    status, text = _ANSWERS.get(fault) or _refusal(fault.removeprefix(REFUSED))
                    self._reply(status, {"Content-Type": "application/xml"}, text)
                else:
                    self._pass_on(body, fault)

            def _pass_on(self, body: bytes, fault: str | None) -> None:
                connection = http.client.HTTPConnection(proxy._host, timeout=30)
                try:
                    # The Host is signed, and stays the proxy's.
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    answer = connection.getresponse()
                    content = answer.read()
                finally:
                    connection.close()
                proxy.seen.append((self.command, answer.status))
                if fault == "reply lost":
                    self.close_connection = True
                    return
                kept = {name: value for name, value in answer.getheaders() if name.lower() not in _NOT_PASSED_ON}
                self._reply(answer.status, kept, content, cut=fault == "reply cut")

            def _reply(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if status != 204:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if cut else content)
                self.close_connection = self.close_connection or cut

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler


def _target(path: str, body: bytes) -> str:
    name = _UPLOADED.search(body) if "uploadType=" in path else None
    return name[1].decode() if name else unquote(path.partition("?")[0])


def _refusal(message: str) -> tuple[int, bytes]:
    return 403, f"<Error><Code>AccessDenied</Code><Message>{message}</Message></Error>".encode()
