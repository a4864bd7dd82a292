"""A store on Google Cloud Storage, with ``ifGenerationMatch``.

The client of gcsfs signs, sends and repeats each request: six times at most, after about 1, 2, 4, 8 and 16 seconds.
What gcsfs would do around it (look into its cache, ask what kind of bucket it is) is not used.
"""

import errno
import secrets
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote

import orjson

from graphkiln.storage.conditional import ConditionalFilesystem
from graphkiln.storage.filesystem import Entry

_NO_OBJECT = "0"


class GcsFilesystem(ConditionalFilesystem):
    """A prefix of a bucket."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, options)
        self._bucket, self._prefix, _ = self._fs.split_path(self._path("x"))
        self._prefix = self._prefix.removesuffix("x")

    def entries(self, folder: str) -> Iterator[Entry]:
        """List objects, with a request for each thousand; see the contract."""
        prefix = self._prefix + (f"{folder}/" if folder else "")
        found: list[Entry] = []
        following: dict[str, str] = {}
        while True:
            page = self._run(self._page, {"prefix": prefix, **following})
            for item in page.get("items", ()):
                path = item["name"].removeprefix(self._prefix)
                if path and not path.endswith("/"):  # what some tools put in the place of a folder
                    found.append(Entry(path, int(item["size"]), datetime.fromisoformat(item["updated"]).timestamp()))
            if "nextPageToken" not in page:
                break
            following = {"pageToken": page["nextPageToken"]}
        yield from sorted(found)

    async def _page(self, arguments: Mapping[str, str]) -> Any:
        try:
            return await self._call("GET", f"{self._fs.base}b/{quote(self._bucket)}/o", json_out=True, **arguments)
        except FileNotFoundError as error:
            raise self._no_bucket() from error

    async def _get(self, path: str) -> tuple[bytes, str]:
        headers, data = await self._call("GET", self._object(path), alt="media")
        return data, headers["X-Goog-Generation"]

    async def _put(self, path: str, data: bytes, version: str | None) -> bool:
        boundary = secrets.token_hex(16)
        about = orjson.dumps({"name": self._prefix + path})
        head = f"--{boundary}\r\nContent-Type: application/json\r\n\r\n".encode() + about
        head += f"\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        try:
            await self._call(
                "POST",
                f"{self._fs._location}/upload/storage/v1/b/{quote(self._bucket)}/o",
                uploadType="multipart",
                ifGenerationMatch=version or _NO_OBJECT,
                headers={"Content-Type": f"multipart/related; boundary={boundary}"},
                data=b"".join((head, data, f"\r\n--{boundary}--".encode())),
            )
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise self._no_bucket() from error
        return True

    async def _delete(self, path: str, version: str | None) -> bool:
        condition = {} if version is None else {"ifGenerationMatch": version}
        try:
            await self._call("DELETE", self._object(path), **condition)
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    def _object(self, path: str) -> str:
        return f"{self._fs.base}b/{quote(self._bucket)}/o/{quote(self._prefix + path, safe='')}"

    def _no_bucket(self) -> NotADirectoryError:
        return NotADirectoryError(errno.ENOTDIR, f"there is no bucket {self._bucket}")

    async def _call(self, method: str, url: str, **arguments: Any) -> Any:
        """Make one request.

        Raises:
            FileNotFoundError: there is no such object, or no such bucket.
            FileExistsError: the condition does not hold; so gcsfs calls it, whatever the condition was.
        """
        try:
            return await self._fs._call(method, url, **arguments)
        except OSError as error:
            if str(error).startswith("Forbidden"):
                raise PermissionError(errno.EACCES, str(error)) from error
            raise
