"""A store on Azure Blob Storage, with ``If-None-Match`` and ``If-Match`` on ETags.

adlfs finds the account and its credentials; the client of Azure's own package, which it holds, sends each request, and
repeats one that fails for a reason which may pass: three times, after about 15, 20 and 25 seconds.
"""

import errno
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError, IncompleteReadError

from graphkiln.storage.conditional import ConditionalFilesystem, PassingFaultError, outlast
from graphkiln.storage.filesystem import Entry

Answer = TypeVar("Answer")

_CONDITION_FAILED = ("ConditionNotMet", "BlobAlreadyExists", "UnauthorizedBlobOverwrite")
_NO_CONTAINER = "ContainerNotFound"
_NUMBERS = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT}

# In accounts with a hierarchy, folders are listed as blobs that say so.
_FOLDER = "hdi_isfolder"


class AzureFilesystem(ConditionalFilesystem):
    """A prefix of a container."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, options)
        container, prefix, _ = self._fs.split_path(self._path("x"))
        self._container, self._prefix = container, prefix.removesuffix("x")

    def entries(self, folder: str) -> Iterator[Entry]:
        """List objects, with a request for each five thousand; see the contract."""
        yield from self._run(self._entries, self._prefix + (f"{folder}/" if folder else ""))

    async def _entries(self, prefix: str) -> list[Entry]:
        async def list_all() -> list[Entry]:
            client = self._fs.service_client.get_container_client(self._container)
            found: list[Entry] = []
            async for item in client.list_blobs(name_starts_with=prefix, include=["metadata"]):
                path = item.name.removeprefix(self._prefix)
                if path and not path.endswith("/") and not (item.metadata or {}).get(_FOLDER):
                    found.append(Entry(path, item.size, item.last_modified.timestamp()))
            return sorted(found)

        return await outlast(self._call, list_all)

    async def _get(self, path: str) -> tuple[bytes, str]:
        async def download() -> tuple[bytes, str]:
            answer = await self._blob(path).download_blob()
            return await answer.readall(), answer.properties.etag

        return await outlast(self._call, download)

    async def _put(self, path: str, data: bytes, version: str | None) -> bool:
        upload = functools.partial(self._blob(path).upload_blob, data, overwrite=version is not None)
        return await self._condition_held(functools.partial(upload, **_condition(version)))

    async def _delete(self, path: str, version: str | None) -> bool:
        return await self._condition_held(functools.partial(self._blob(path).delete_blob, **_condition(version)))

    async def _condition_held(self, request: Callable[[], Awaitable[object]]) -> bool:
        try:
            await outlast(self._call, request)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    async def _call(self, request: Callable[[], Awaitable[Answer]]) -> Answer:
        """Make one request.

        Raises:
            FileNotFoundError: there is no such blob.
            FileExistsError: the condition does not hold, whatever it was.
        """
        try:
            return await request()
        except IncompleteReadError as error:
            raise PassingFaultError(error) from error
        except HttpResponseError as error:
            code = getattr(error, "error_code", None)
            if code == _NO_CONTAINER:
                raise NotADirectoryError(errno.ENOTDIR, f"there is no container {self._container}") from error
            if code in _CONDITION_FAILED:
                raise FileExistsError(errno.EEXIST, "the condition does not hold") from error
            number = _NUMBERS.get(error.status_code or 0, errno.EIO)
            raise OSError(number, error.reason or type(error).__name__) from error

    def _blob(self, path: str) -> Any:
        return self._fs.service_client.get_blob_client(self._container, self._prefix + path)


def _condition(version: str | None) -> dict[str, Any]:
    return {} if version is None else {"etag": version, "match_condition": MatchConditions.IfNotModified}
