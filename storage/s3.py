"""A store on S3 or what speaks its protocol, with ``If-None-Match`` and ``If-Match`` on ETags.

A request that fails for a reason which may pass (throttling, a server's fault, a broken connection) is repeated by
botocore, after waits that are drawn at random below 1, 2, 4, … seconds: about a minute in all at most. s3fs's own
repetitions, which would multiply with these, are turned off.
"""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from aiohttp import ClientPayloadError
from s3fs.core import S3_RETRYABLE_ERRORS

from graphkiln.storage.conditional import ConditionalFilesystem, PassingFaultError, outlast
from graphkiln.storage.credentials import Credentials
from graphkiln.storage.filesystem import Entry
from graphkiln.storage.remote import PARALLEL_REQUESTS

_RETRIES = {"mode": "legacy", "max_attempts": 6}
_RETRY_VARIABLES = ("AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS")

_DELETED_AT_ONCE = 1000

# The condition does not hold; the write overlaps another one, so that nobody knows; there is no such object.
_CONDITION_FAILED = ("PreconditionFailed", "412")
_OVERLAP = ("ConditionalRequestConflict", "OperationAborted", "409")
_MISSING = ("NoSuchKey", "404", "NotFound")


class S3Filesystem(ConditionalFilesystem):
    """A prefix of a bucket."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        given = Credentials(url, options)
        if given.password:
            options = {"key": unquote(given.user), "secret": unquote(given.password), **options}
        config = {"max_pool_connections": PARALLEL_REQUESTS, **options.get("config_kwargs", {})}
        if not any(os.environ.get(name) for name in _RETRY_VARIABLES):
            config.setdefault("retries", _RETRIES)
        super().__init__(given.url, {**options, "config_kwargs": config})
        self._fs.retries = 1
        self._bucket, self._prefix, _ = self._fs.split_path(self._path(""))

    def entries(self, folder: str) -> Iterator[Entry]:
        """List objects, with a request for each thousand; see the contract."""
        prefix = self._prefix + (f"{folder}/" if folder else "")
        found: list[Entry] = []
        following: dict[str, str] = {}
        while True:
            page = self._run(self._call, "list_objects_v2", {"Prefix": prefix, **following})
            for item in page.get("Contents", ()):
                path = item["Key"].removeprefix(self._prefix)
                if path and not path.endswith("/"):  # what some tools put in the place of a folder
                    found.append(Entry(path, item["Size"], item["LastModified"].timestamp()))
            if not page.get("IsTruncated"):
                break
            following = {"ContinuationToken": page["NextContinuationToken"]}
        # S3 lists in this order, but not everything that speaks its protocol does.
        yield from sorted(found)

    async def _get(self, path: str) -> tuple[bytes, str]:
        return await outlast(self._get_once, path)

    async def _get_once(self, path: str) -> tuple[bytes, str]:
        answer = await self._call("get_object", {"Key": self._prefix + path})
        try:
            async with answer["Body"] as body:
                return await body.read(), answer["ETag"]
        except S3_RETRYABLE_ERRORS as error:
            raise PassingFaultError(error) from error

    async def _put(self, path: str, data: bytes, version: str | None) -> bool:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            await self._call("put_object", {"Key": self._prefix + path, "Body": data, **condition})
        except OSError as error:
            if _condition_failed(error, version):
                return False
            raise
        return True

    async def _delete(self, path: str, version: str | None) -> bool:
        condition = {} if version is None else {"IfMatch": version}
        try:
            await self._call("delete_object", {"Key": self._prefix + path, **condition})
        except OSError as error:
            if _condition_failed(error, version):
                return False
            raise
        return True

    async def _delete_many(self, paths: Sequence[str]) -> None:
        batches = [paths[at : at + _DELETED_AT_ONCE] for at in range(0, len(paths), _DELETED_AT_ONCE)]
        left: list[str] = []
        for answer in await self._all_of(self._delete_batch, [(batch,) for batch in batches]):
            if isinstance(answer, OSError):
                raise answer
            left += answer
        # One by one, each is repeated if that may help, and says what is wrong if not.
        await super()._delete_many(left)

    async def _delete_batch(self, paths: Sequence[str]) -> list[str]:
        """Delete at most a thousand objects with one request, and return those that the server could not delete."""
        keys = [{"Key": self._prefix + path} for path in paths]
        answer = await self._call("delete_objects", {"Delete": {"Objects": keys, "Quiet": True}})
        return [item["Key"].removeprefix(self._prefix) for item in answer.get("Errors", ())]

    async def _call(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        return await outlast(self._call_once, operation, arguments)

    async def _call_once(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        try:
            return await self._fs._call_s3(operation, Bucket=self._bucket, **arguments)
        except ClientPayloadError as error:  # which botocore does not take for a broken connection
            raise PassingFaultError(error) from error
        except OSError as error:
            if _code(error) in _OVERLAP:
                raise PassingFaultError(error) from error
            if _code(error) == "NoSuchBucket":
                raise NotADirectoryError(errno.ENOTDIR, f"there is no bucket {self._bucket}") from error
            raise


def _condition_failed(error: OSError, version: str | None) -> bool:
    return _code(error) in (_CONDITION_FAILED if version is None else (*_CONDITION_FAILED, *_MISSING))


def _code(error: OSError) -> str:
    """Return S3's own word for an error, which s3fs keeps as the cause of the one that it raises."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
