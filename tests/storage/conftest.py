import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.locations import open_filesystem
from graphkiln.storage.remote import RemoteFilesystem
from graphkiln.storage.s3 import S3Filesystem
from graphkiln.storage.store import Store
from tests.storage.azure_server import azure_options
from tests.storage.gcs_server import gcs_options
from tests.storage.s3_servers import BUCKET, options_for
from tests.storage.samples import NOW


@pytest.fixture
def in_memory() -> Iterator[Callable[[], StoreFilesystem]]:
    """Makes empty file systems in memory."""
    urls: list[str] = []

    def make() -> StoreFilesystem:
        urls.append(f"memory://store-{uuid.uuid4().hex}")
        return RemoteFilesystem(urls[-1], {})

    yield make
    for url in urls:
        memory, root = fsspec.url_to_fs(url)
        if memory.exists(root):
            memory.rm(root, recursive=True)


@pytest.fixture
def in_s3(request: pytest.FixtureRequest) -> Callable[[], StoreFilesystem]:
    """Makes empty file systems on a real S3 server."""
    endpoint: str = request.getfixturevalue("s3_endpoint")
    return lambda: S3Filesystem(f"s3://{BUCKET}/{uuid.uuid4().hex}", options_for(endpoint))


@pytest.fixture
def in_gcs(request: pytest.FixtureRequest) -> Callable[[], StoreFilesystem]:
    """Makes empty file systems on a server that speaks Google Cloud Storage's protocol."""
    endpoint: str = request.getfixturevalue("gcs_endpoint")
    return lambda: open_filesystem(f"gs://{BUCKET}/{uuid.uuid4().hex}", gcs_options(endpoint))


@pytest.fixture
def in_azure(request: pytest.FixtureRequest) -> Callable[[], StoreFilesystem]:
    """Makes empty file systems on a server that speaks Azure Blob Storage's protocol."""
    endpoint: str = request.getfixturevalue("azure_endpoint")
    return lambda: open_filesystem(f"az://{BUCKET}/{uuid.uuid4().hex}", azure_options(endpoint))


@pytest.fixture(params=["local", "memory"])
def filesystem(
    request: pytest.FixtureRequest, tmp_path: Path, in_memory: Callable[[], StoreFilesystem]
) -> StoreFilesystem:
    """An empty file system of each kind."""
    return LocalFilesystem(tmp_path / "store") if request.param == "local" else in_memory()


@pytest.fixture
def store(filesystem: StoreFilesystem) -> Store:
    """An empty store on each kind of file system."""
    return Store(filesystem, now=lambda: NOW)
