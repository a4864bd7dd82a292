"""What tests of several folders share."""

from collections.abc import Iterator

import pytest

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
