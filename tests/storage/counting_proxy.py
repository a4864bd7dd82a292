"""An HTTP proxy before an S3 server that writes down every request, whichever client makes it."""

import http.client
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding")


class Request(NamedTuple):
    """One request: its method, and its path within the bucket with what is asked of it."""

    method: str
    path: str


class CountingProxy:
    """What went through.

    Attributes:
        endpoint: the URL for clients.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._requests: list[Request] = []

    def note(self, method: str, target: str) -> None:
        path = unquote(urlsplit(target).path).split("/", 2)[-1]
        query = urlsplit(target).query
        self._requests.append(Request(method, f"{path}?{query}" if query else path))

    def take(self) -> list[Request]:
        """Return the requests since this was last called."""
        taken, self._requests = self._requests, []
        return taken


@contextmanager
def counting_proxy(upstream: str) -> Iterator[CountingProxy]:
    """Pass requests on to the server at `upstream`, and count them."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.upstream = urlsplit(upstream).netloc
    server.proxy = CountingProxy(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.proxy
    finally:
        server.shutdown()
        server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    upstream: str
    proxy: CountingProxy
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    _upstream: http.client.HTTPConnection | None = None

    def _pass_on(self) -> None:
        self.server.proxy.note(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        # As it came, as the client has signed it, the name of the host included.
        self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in (*_HOP_BY_HOP, "expect"):
                self._upstream.putheader(name, value)
        self._upstream.endheaders(body)
        with self._upstream.getresponse() as answer:
            content = answer.read()
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in (*_HOP_BY_HOP, "content-length"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            if length is not None:
                self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on  # noqa: N815 (the names are those of http.server)

    def finish(self) -> None:
        super().finish()
        if self._upstream is not None:
            self._upstream.close()

    def log_message(self, *_: object) -> None:
        """Print nothing."""
