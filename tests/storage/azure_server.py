"""A real server on this host that speaks Azure Blob Storage's protocol: Azurite, if npm has installed it."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.storage.s3_servers import BUCKET, free_port, running

# Azurite's one account; its key is the same everywhere, and published.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azurite_program() -> str | None:
    """Return the path of Azurite's server for blobs, or None if it is not installed."""
    return shutil.which("azurite-blob")


@contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Run the server with one container, and yield its endpoint."""
    program = azurite_program()
    assert program is not None
    port = free_port()
    command = [
        *(program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"),
        *("--skipApiVersionCheck", "--disableTelemetry", "--silent"),
    ]
    with running(command, folder, port, {}) as endpoint:
        asyncio.run(_make_container(endpoint))
        yield endpoint


def azure_options(endpoint: str) -> dict[str, str]:
    """Return what fsspec passes to adlfs for this server."""
    account = f"AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={endpoint}/{_ACCOUNT};"
    return {"connection_string": f"DefaultEndpointsProtocol=http;{account}"}


async def _make_container(endpoint: str) -> None:
    from azure.storage.blob.aio import BlobServiceClient

    async with BlobServiceClient.from_connection_string(azure_options(endpoint)["connection_string"]) as client:
        await client.create_container(BUCKET)
