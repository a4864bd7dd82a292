"""(bulk) Storing and loading 10,000 small objects, beside the best that the plain libraries can do."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec

from benchmarks.measure import Cost, Row, Table, both, least, rounds
from benchmarks.workspace import Workspace
from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.locations import open_filesystem
from graphkiln.storage.store import Store
from tests.storage.s3_servers import BUCKET, options_for, seaweedfs

OBJECTS, SIZE = 10_000, 1024
GOAL = 1.3
ROUNDS = 5
BUDGET_SECONDS = 30.0

# Both sides take turns on S3 too, where one round of everything takes minutes.
_SLICE = 1000
_AT_ONCE = 32


class _Side:
    """One way to store and to load, and what both have taken.

    Its parts are passed in: how to store contents that are given by paths, and how to load what that returned.
    """

    def __init__(self, name: str, store: Callable[[dict[str, bytes]], Any], load: Callable[[Any], list[bytes]]) -> None:
        self.name = name
        self._store, self._load = store, load
        self.stored: list[Cost] = []
        self.loaded: list[Cost] = []

    def run(self, contents: dict[str, bytes]) -> None:
        """Store some contents and load them again."""
        cost, stored = _timed(lambda: self._store(contents))
        self.stored.append(cost)
        cost, loaded = _timed(lambda: self._load(stored))
        self.loaded.append(cost)
        if loaded != list(contents.values()):
            raise RuntimeError(f"{self.name} did not load what it stored")


def measure(workspace: Workspace) -> Table:
    """Store and load on a local disk, then on SeaweedFS."""
    rows = [*_local(workspace)]
    with seaweedfs(workspace.new("seaweedfs")) as endpoint:
        rows += _on_s3(endpoint)
    return Table(
        f"(bulk) Storing and loading {OBJECTS} objects of {SIZE} bytes, of one process",
        ("graphkiln", "beside it"),
        rows,
        [
            "Ours names objects by their digests, overwrites none, leaves none half, and checks what it loads.",
            "CPU is that of the client alone; on S3 the server is at work on the same cores.",
        ],
    )


def _local(workspace: Workspace) -> Iterator[Row]:
    ours = _ours(str(workspace.new("store")), {})
    plain = _fsspec_local(workspace.new("fsspec"))
    loop = _loop(workspace.new("loop"))
    for number in rounds(ROUNDS, BUDGET_SECONDS):
        contents = _contents(number, OBJECTS)
        for side in (ours, plain, loop):
            side.run(contents)
    for what in ("stored", "loaded"):
        mine = least(getattr(ours, what))
        yield from both(f"local, {what}, ÷ fsspec's bulk call", mine, least(getattr(plain, what)), GOAL)
        yield from both(f"local, {what}, ÷ a loop of open", mine, least(getattr(loop, what)))


def _on_s3(endpoint: str) -> Iterator[Row]:
    ours = _ours(f"s3://{BUCKET}/store", options_for(endpoint))
    plain = _s3fs(endpoint)
    sides = [ours, plain, *([_obstore(endpoint)] if find_spec("obstore") else [])]
    for number in range(OBJECTS // _SLICE):
        contents = _contents(1000 + number, _SLICE)
        for side in sides:
            side.run(contents)
    for what in ("stored", "loaded"):
        mine = _sum(getattr(ours, what))
        yield from both(f"S3, {what}, ÷ s3fs's bulk call", mine, _sum(getattr(plain, what)), GOAL)
        for further in sides[2:]:
            yield from both(f"S3, {what}, ÷ {further.name}", mine, _sum(getattr(further, what)))


def _ours(url: str, options: dict[str, str]) -> _Side:
    store = Store(open_filesystem(url, options))
    store.prepare_for_writing()

    def load(refs: Sequence[BlobRef]) -> list[bytes]:
        return store.get_blobs([(ref, "an object") for ref in refs])

    return _Side("graphkiln", lambda contents: store.put_blobs(list(contents.values())), load)


def _fsspec_local(folder: Path) -> _Side:
    filesystem = fsspec.filesystem("file", auto_mkdir=True)

    def store(contents: dict[str, bytes]) -> list[str]:
        named = {f"{folder}/{path}": content for path, content in contents.items()}
        filesystem.pipe(named)
        return list(named)

    def load(paths: list[str]) -> list[bytes]:
        found = filesystem.cat(paths)
        return [found[path] for path in paths]

    return _Side("fsspec", store, load)


def _loop(folder: Path) -> _Side:
    def store(contents: dict[str, bytes]) -> list[str]:
        for path, content in contents.items():
            try:
                file = open(f"{folder}/{path}", "wb")  # noqa: PTH123, SIM115  # the fastest there is
            except FileNotFoundError:
                Path(f"{folder}/{path}").parent.mkdir(parents=True)
                file = open(f"{folder}/{path}", "wb")  # noqa: PTH123, SIM115
            with file:
                file.write(content)
        return list(contents)

    def load(paths: list[str]) -> list[bytes]:
        found = []
        for path in paths:
            with open(f"{folder}/{path}", "rb") as file:  # noqa: PTH123
                found.append(file.read())
        return found

    return _Side("loop", store, load)


def _s3fs(endpoint: str) -> _Side:
    options = {"use_listings_cache": False, "config_kwargs": {"max_pool_connections": _AT_ONCE}}
    filesystem = fsspec.filesystem("s3", **options_for(endpoint), **options)

    def store(contents: dict[str, bytes]) -> list[str]:
        named = {f"{BUCKET}/s3fs/{path}": content for path, content in contents.items()}
        filesystem.pipe(named, batch_size=_AT_ONCE)
        return list(named)

    def load(paths: list[str]) -> list[bytes]:
        # With more than one, each object is asked for its size before.
        found = filesystem.cat(paths, max_concurrency=1, batch_size=_AT_ONCE)
        return [found[path] for path in paths]

    return _Side("s3fs", store, load)


def _obstore(endpoint: str) -> _Side:
    import obstore
    from obstore.store import S3Store

    given = options_for(endpoint)
    bucket = S3Store(
        BUCKET,
        endpoint=endpoint,
        access_key_id=given["key"],
        secret_access_key=given["secret"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    async def get(path: str) -> bytes:
        answer = await obstore.get_async(bucket, path)
        return bytes(await answer.bytes_async())

    async def put(path: str, content: bytes) -> None:
        await obstore.put_async(bucket, path, content)

    def store(contents: dict[str, bytes]) -> list[str]:
        asyncio.run(_all(put, list(contents.items())))
        return list(contents)

    def load(paths: list[str]) -> list[bytes]:
        return asyncio.run(_all(get, [(path,) for path in paths]))

    return _Side("obstore", store, load)


async def _all(request: Callable[..., Awaitable[Any]], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    done: dict[int, Any] = {}
    waiting = iter(enumerate(arguments))

    async def work() -> None:
        for number, given in waiting:
            done[number] = await request(*given)

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    return [done[number] for number in range(len(arguments))]


def _contents(seed: int, number: int) -> dict[str, bytes]:
    """Return noise, by the paths that ours finds for it."""
    noise = random.Random(seed)  # noqa: S311
    contents = [noise.randbytes(SIZE) for _ in range(number)]
    return {layout.by_digest(layout.BLOBS, digest_bytes(content)): content for content in contents}


def _timed(act: Callable[[], Any]) -> tuple[Cost, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    found = act()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu), found


def _sum(costs: Sequence[Cost]) -> Cost:
    return Cost(sum(cost.wall for cost in costs), sum(cost.cpu for cost in costs))
