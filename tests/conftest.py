"""What tests of several folders share."""

import logging
from collections.abc import Iterator

import pytest

from tests.storage.s3_servers import seaweedfs


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real S3 server that honours conditional requests."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs") / "data") as endpoint:
        yield endpoint


@pytest.fixture
def without_warnings() -> Iterator[None]:
    """Those of damage that is done on purpose would be thousands."""
    logging.getLogger("graphkiln").disabled = True
    yield
    logging.getLogger("graphkiln").disabled = False
