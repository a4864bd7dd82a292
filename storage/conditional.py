"""An object store that takes conditions with its requests: S3, Google Cloud Storage and Azure in what they share.

Every state of an object has a version. A write goes through only if the object still has the version that was
compared, or if there is none, so that of all writers of one key exactly one wins. A server that ignores these
conditions is found out by `Store.prepare_for_writing`, and refused.

A reply that is lost makes the client repeat a write which has happened, and the repetition fails its condition.
Therefore `replace` looks at what is there after a conflict: what holds our bytes is ours. (Mutable documents differ
from one another, leases hold a nonce.) `create` leaves the look to its callers, who read what is there anyway.

Many objects are asked for side by side, a bounded number of them at once, on the event loop that fsspec runs in a
thread of its own.
"""

import abc
import asyncio
import errno
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fsspec.asyn import sync as run_async

from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.remote import PARALLEL_REQUESTS, RemoteFilesystem

Answer = TypeVar("Answer")


# How often a request is made whose failure may pass, but is not known as such to the library that makes it.
_TRIES = 6
_SHORTEST_WAIT_SECONDS = 0.1


class PassingFaultError(OSError):
    """A failure of a request that may pass, such as an answer that breaks off."""

    def __init__(self, words: object) -> None:
        super().__init__(errno.EIO, str(words))


async def outlast(request: Callable[..., Awaitable[Answer]], *arguments: object) -> Answer:
    """Make a request until it fails with no `PassingFaultError`, a few times, with growing random waits between."""
    tries = 0
    while True:
        try:
            return await request(*arguments)
        except PassingFaultError:
            tries += 1
            if tries == _TRIES:
                raise
        await asyncio.sleep(random.random() * _SHORTEST_WAIT_SECONDS * 2**tries)  # noqa: S311  # nothing secret about it


class ConditionalFilesystem(RemoteFilesystem):
    """A folder of an object store with versions. A subclass says how each single request is made."""

    @abc.abstractmethod
    async def _get(self, path: str) -> tuple[bytes, str]:
        """Return an object and its version.

        Raises:
            FileNotFoundError: there is none.
        """

    @abc.abstractmethod
    async def _put(self, path: str, data: bytes, version: str | None) -> bool:
        """Write an object if it has this version; None: if there is none. Tell whether that was so."""

    @abc.abstractmethod
    async def _delete(self, path: str, version: str | None) -> bool:
        """Delete an object if it has this version; None: whatever it has. Tell whether the condition held."""

    def read(self, path: str) -> bytes:
        """Return the whole object; see the contract."""
        return self._run(self._get, path)[0]

    def create(self, path: str, data: bytes) -> bool:
        """Write if there is no object; see the contract."""
        return self._run(self._put, path, data, None)

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        """Compare, then write if the version is still the same; see the contract."""
        return self._run(self._replace, path, data, expected)

    def remove(self, path: str, *, expected: bytes) -> bool:
        """Compare, then delete if the version is still the same; see the contract."""
        return self._run(self._remove, path, expected)

    def delete(self, path: str) -> None:
        """Delete an object; see the contract."""
        self._run(self._delete, path, None)

    def read_many(self, paths: Sequence[str]) -> list[bytes | OSError | DamagedStoreError]:
        """Read side by side; see the contract."""
        found = self._run(self._all_of, self._get, [(path,) for path in paths])
        return [item if isinstance(item, OSError) else item[0] for item in found]

    def create_many(self, objects: Sequence[tuple[str, bytes]]) -> list[bool | OSError]:
        """Write side by side; see the contract."""
        return self._run(self._all_of, self._put, [(path, data, None) for path, data in objects])

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete side by side; see the contract."""
        self._run(self._delete_many, paths)

    async def _delete_many(self, paths: Sequence[str]) -> None:
        for item in await self._all_of(self._delete, [(path, None) for path in paths]):
            if isinstance(item, OSError):
                raise item

    async def _replace(self, path: str, data: bytes, expected: bytes | None) -> bool:
        version = None if expected is None else await self._version_of(path, expected)
        if expected is not None and version is None:
            return False
        return await self._put(path, data, version) or await self._version_of(path, data) is not None

    async def _remove(self, path: str, expected: bytes) -> bool:
        version = await self._version_of(path, expected)
        return version is not None and await self._delete(path, version)

    async def _version_of(self, path: str, expected: bytes) -> str | None:
        """Return the version of an object if it holds `expected`."""
        try:
            data, version = await self._get(path)
        except FileNotFoundError:
            return None
        return version if data == expected else None

    async def _all_of(
        self, do: Callable[..., Awaitable[Answer]], arguments: Sequence[tuple[object, ...]]
    ) -> list[Answer | OSError]:
        """Return what each call returns or raises."""
        done: dict[int, Answer | OSError] = {}
        waiting = iter(enumerate(arguments))

        async def work() -> None:
            for number, given in waiting:
                try:
                    with self._faults():
                        done[number] = await do(*given)
                except OSError as error:
                    done[number] = error

        await asyncio.gather(*(work() for _ in range(min(PARALLEL_REQUESTS, len(arguments)))))
        return [done[number] for number in range(len(arguments))]

    def _run(self, do: Callable[..., Awaitable[Answer]], *arguments: object) -> Answer:
        with self._faults():
            answer: Answer = run_async(self._fs.loop, do, *arguments)
        return answer
