"""Real S3 servers on this host: SeaweedFS, which honours conditional requests, and nanio, which ignores them."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from graphkiln.storage.s3 import S3Filesystem

BUCKET = "kiln"
ACCESS_KEY, SECRET_KEY = "graphkiln", "not-a-secret"
_START_SECONDS = 60.0


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """Run SeaweedFS with one bucket, and yield its endpoint."""
    port = free_port()
    command = [
        *(_tool("weed"), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={port}"),
        *(f"-bucket={BUCKET}", "-admin.ui=false", "-webdav=false", "-master.telemetry=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        # Its other servers would take fixed ports, which two test workers would fight for.
        *(f"-{server}.port{kind}={free_port()}" for server in ("master", "volume", "filer") for kind in ("", ".grpc")),
        *(f"-{option}={free_port()}" for option in ("admin.port", "admin.port.grpc", "s3.port.grpc")),
    ]
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with running(command, folder, port, keys) as endpoint:
        _wait_for_bucket(endpoint)
        yield endpoint


@contextmanager
def nanio(folder: Path) -> Iterator[str]:
    """Run nanio, and yield its endpoint; buckets are yet to be made."""
    port = free_port()
    command = [_tool("nanio"), "serve", "--host", "127.0.0.1", "--port", str(port), "--data-dir", str(folder)]
    keys = {"NANIO_ACCESS_KEY": ACCESS_KEY, "NANIO_SECRET_KEY": SECRET_KEY}
    with running(command, folder, port, keys) as endpoint:
        yield endpoint


@contextmanager
def running(command: Sequence[str], folder: Path, port: int, environment: dict[str, str]) -> Iterator[str]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.log").open("w+b") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, **environment},
        )
        try:
            _wait_for(process, port, log.name)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _wait_for(process: "subprocess.Popen[bytes]", port: int, log: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5):
                return
        except urllib.error.HTTPError:
            return  # it answers, if only that one has to sign
        except OSError:
            time.sleep(0.05)  # the server is not there yet
    raise RuntimeError(f"{process.args!r} does not answer:\n{Path(log).read_text(errors='replace')[-3000:]}")


def options_for(endpoint: str) -> dict[str, str]:
    """Return what fsspec passes to s3fs for one of these servers."""
    return {"endpoint_url": endpoint, "key": ACCESS_KEY, "secret": SECRET_KEY}


def _wait_for_bucket(endpoint: str) -> None:
    filesystem = S3Filesystem(f"s3://{BUCKET}/ready", options_for(endpoint))
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            filesystem.create("yes", b"")
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # the server makes the bucket after it has begun to answer
        else:
            return


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _tool(name: str) -> str:
    """Return the path of a program that a package of this environment installed."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert found is not None, f"{name} is not installed in {sys.prefix}"
    return found
