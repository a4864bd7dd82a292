"""A store on S3 or what speaks its protocol, with conditional requests.

`create` sends ``If-None-Match: *`` and `replace` and `remove` send ``If-Match`` with the ETag of what was
compared, so that of all writers of one key exactly one wins. A server that ignores these conditions is found out
by `Store.prepare_for_writing`, and refused.

A reply that is lost makes the client repeat a write which has happened, and the repetition fails its condition.
Therefore every conflict is followed by a look at what is there: what holds our bytes is ours. (Blobs hold their
digest, mutable documents differ from one another, leases hold a nonce.)
"""

from typing import Any

from fsspec.asyn import sync as run_async

from graphkiln.storage.remote import RemoteFilesystem

# What S3 and its relatives answer to a condition that does not hold, or to a write that overlaps another.
_CONFLICTS = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_MISSING = ("NoSuchKey", "404", "NotFound")


class S3Filesystem(RemoteFilesystem):
    """A prefix of a bucket."""

    def create(self, path: str, data: bytes) -> bool:
        """Put with ``If-None-Match: *``; see the contract."""
        return self._put(path, data, IfNoneMatch="*")

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        """Compare, then put with ``If-Match``; see the contract."""
        if expected is None:
            return self._put(path, data, IfNoneMatch="*")
        etag = self._etag_of(path, expected)
        return etag is not None and self._put(path, data, IfMatch=etag)

    def remove(self, path: str, *, expected: bytes) -> bool:
        """Compare, then delete with ``If-Match``; see the contract."""
        etag = self._etag_of(path, expected)
        if etag is None:
            return False
        return self._call("delete_object", path, IfMatch=etag) is not None

    def _put(self, path: str, data: bytes, **condition: str) -> bool:
        if self._call("put_object", path, Body=data, **condition) is not None:
            return True
        try:
            return self.read(path) == data and "IfMatch" in condition
        except FileNotFoundError:
            return False

    def _etag_of(self, path: str, expected: bytes) -> str | None:
        """Return the ETag of the object if it holds `expected`."""
        found = self._call("get_object", path)
        if found is None:
            return None
        body: bytes = run_async(self._fs.loop, found["Body"].read)
        etag: str = found["ETag"]
        return etag if body == expected else None

    def _call(self, operation: str, path: str, **arguments: Any) -> Any:
        """Make one request; None if its condition does not hold, or there is no such object."""
        bucket, key, _ = self._fs.split_path(self._path(path))
        with self._faults():
            try:
                return self._fs.call_s3(operation, Bucket=bucket, Key=key, **arguments)
            except OSError as error:
                if _code(error) in (*_CONFLICTS, *_MISSING):
                    return None
                raise


def _code(error: OSError) -> str:
    """Return S3's own word for an error, which s3fs keeps as the cause of the one that it raises."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
