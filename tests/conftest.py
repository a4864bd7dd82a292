"""What tests of several folders share."""

import logging
from collections.abc import Iterator

import pytest

from tests.storage.azure_server import azurite, azurite_program
from tests.storage.gcs_server import fake_gcs
from tests.storage.s3_servers import seaweedfs


@pytest.fixture(scope="session", autouse=True)
def no_node_cache() -> Iterator[None]:
    """Nothing is left in the cache of whoever runs the tests; those that are about it name one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHKILN_NODE_CACHE", "off")
        yield


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server that honours conditional requests."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs") / "data") as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def gcs_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that speaks Google Cloud Storage's protocol."""
    with fake_gcs(tmp_path_factory.mktemp("gcs") / "data") as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that speaks Azure Blob Storage's protocol."""
    if azurite_program() is None:
        pytest.skip("Azurite is not installed: npm install --global azurite")
    with azurite(tmp_path_factory.mktemp("azure") / "data") as endpoint:
        yield endpoint


@pytest.fixture
def without_warnings() -> Iterator[None]:
    """Those of damage that is done on purpose would be thousands."""
    logging.getLogger("graphkiln").disabled = True
    yield
    logging.getLogger("graphkiln").disabled = False
