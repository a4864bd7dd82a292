"""The cache of a host: each digest is fetched once, nothing wrong comes out of it, and nothing done to it hurts."""

import errno
import itertools
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.errors import BadInputError, DamagedStoreError, StoreUnavailableError
from graphkiln.storage.filesystem import Hashed
from graphkiln.storage.node_cache import NodeCache, default_node_cache
from tests.storage.mounts import Mount, small_disk
from tests.storage.samples import HARMS, noise

ROOMY = 10**9
CONTENTS = [b"", b"x", noise(5000), noise(100_000)]


def hashed(content: bytes) -> tuple[bytes, Digest]:
    return content, digest_bytes(content)


class Remote:
    """What the store holds, and what was asked of it."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.objects: dict[Digest, Hashed] = {}
        for content in contents:
            self.objects[digest_bytes(content)] = hashed(content)
        self.digests = list(self.objects)
        self.asked: list[list[Digest]] = []

    def fetch(self, digests: list[Digest]) -> list[Hashed]:
        self.asked.append(digests)
        return [self.objects[digest] for digest in digests]

    def take_asked(self) -> list[list[Digest]]:
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def remote() -> Remote:
    return Remote(CONTENTS)


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "node" / "blobs", ROOMY)


def got(cache: NodeCache, digests: list[Digest], fetch: Callable[[list[Digest]], list[Hashed]]) -> list[object]:
    """What is read, without the digests that matched."""
    found = cache.read(digests, fetch)
    assert [item[1] for item in found if isinstance(item, tuple)] == [
        digest for digest, item in zip(digests, found, strict=True) if isinstance(item, tuple)
    ]
    return [item[0] if isinstance(item, tuple) else item for item in found]


def content_of(remote: Remote, digest: Digest) -> object:
    item = remote.objects[digest]
    return item[0] if isinstance(item, tuple) else item


def copy_of(cache: NodeCache, digest: Digest) -> Path:
    return cache.folder / digest[:2] / digest


def copies(cache: NodeCache) -> dict[str, int]:
    """The sizes of all copies by digest."""
    return {path.name: path.stat().st_size for path in cache.folder.glob("??/*") if not path.name.startswith(".")}


def refuse(digests: list[Digest]) -> list[Hashed]:
    raise AssertionError(f"fetched {digests}")


# ---------------------------------------------------------------------- what it is for


def test_what_was_fetched_is_read_from_here_by_all_readers(cache: NodeCache, remote: Remote) -> None:
    assert got(cache, remote.digests, remote.fetch) == CONTENTS
    assert remote.take_asked() == [remote.digests]
    backwards = [*remote.digests[::-1], remote.digests[0]]
    for reader in (cache, NodeCache(cache.folder, ROOMY)):
        assert got(reader, backwards, refuse) == [*CONTENTS[::-1], CONTENTS[0]]
        assert got(reader, [], refuse) == []


def test_only_what_is_missing_is_fetched_and_each_digest_once(cache: NodeCache, remote: Remote) -> None:
    first, second, *_ = remote.digests
    assert got(cache, [second], remote.fetch) == [CONTENTS[1]]
    assert got(cache, [first, second, first], remote.fetch) == [CONTENTS[0], CONTENTS[1], CONTENTS[0]]
    assert remote.take_asked() == [[second], [first]]


def test_nothing_is_touched_before_something_is_read(cache: NodeCache) -> None:
    assert not cache.folder.parent.exists()
    assert got(cache, [], refuse) == []
    assert not cache.folder.parent.exists()


def test_what_cannot_be_fetched_is_said_and_not_kept(cache: NodeCache, remote: Remote) -> None:
    lost, well = remote.digests[1:3]
    errors: list[FileNotFoundError | DamagedStoreError] = [
        FileNotFoundError(errno.ENOENT, "gone"),
        DamagedStoreError("its bytes do not match its digest"),
    ]
    for error in errors:
        remote.objects[lost] = error
        assert got(cache, [lost, well], remote.fetch) == [error, CONTENTS[2]]
    assert remote.take_asked() == [[lost, well], [lost]]
    assert copies(cache).keys() == {well}
    remote.objects[lost] = hashed(CONTENTS[1])
    assert got(cache, [lost], remote.fetch) == [CONTENTS[1]]


def test_what_does_not_match_its_digest_is_returned_and_not_kept(cache: NodeCache, remote: Remote) -> None:
    wrong = hashed(b"something else")
    remote.objects[remote.digests[0]] = wrong
    for _ in range(2):
        assert cache.read(remote.digests[:1], remote.fetch) == [wrong]
        cache.keep([(remote.digests[0], wrong)])
    assert copies(cache) == {}


def test_a_fetch_that_fails_as_a_whole_keeps_nobody_from_trying_again(cache: NodeCache, remote: Remote) -> None:
    def fail(digests: list[Digest]) -> list[Hashed]:
        raise StoreUnavailableError("the network is down", reason="store-io", retryable=True)

    with pytest.raises(StoreUnavailableError):
        cache.read(remote.digests, fail)
    assert got(cache, remote.digests, remote.fetch) == CONTENTS


def test_what_is_kept_by_a_writer_is_read_from_here(cache: NodeCache, remote: Remote) -> None:
    for _ in range(2):
        cache.keep(remote.objects.items())
    assert got(cache, remote.digests, refuse) == CONTENTS


def test_a_name_that_is_no_digest_is_no_path(cache: NodeCache, remote: Remote) -> None:
    for name in ("../../x", "a" * 63, ""):
        with pytest.raises(ValueError, match="is not a digest"):
            cache.read([Digest(name)], remote.fetch)
        with pytest.raises(ValueError, match="is not a digest"):
            cache.keep([(Digest(name), (b"x", Digest(name)))])


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("content", [b"some bytes", noise(100_000)], ids=["small", "large"])
@pytest.mark.parametrize("how", HARMS)
def test_a_damaged_copy_is_fetched_again_and_mended(
    cache: NodeCache, content: bytes, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    remote = Remote([content])
    cache.read(remote.digests, remote.fetch)
    path = copy_of(cache, remote.digests[0])
    change = HARMS[how]
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(content))
    for _ in range(2):
        assert got(cache, remote.digests, remote.fetch) == [content]
    assert len(remote.asked) == 2
    assert path.read_bytes() == content
    assert [str(path) in record.getMessage() for record in caplog.records] == ([True] if change else [])


def _fill_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


ODD: dict[str, Callable[[Path], None]] = {
    "folder": _fill_folder,
    "pipe": os.mkfifo,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("odd", ODD)
def test_something_else_in_the_place_of_a_copy_makes_way(cache: NodeCache, remote: Remote, odd: str) -> None:
    digest = remote.digests[2]
    cache.read(remote.digests, remote.fetch)
    path = copy_of(cache, digest)
    path.unlink()
    ODD[odd](path)
    assert got(cache, [digest], remote.fetch) == [CONTENTS[2]]
    assert got(cache, [digest], refuse) == [CONTENTS[2]]
    assert path.is_file()


@pytest.mark.parametrize("known", [b"", b"nonsense", b"-1", b"9" * 5000, b"\xff\xfe", None])
def test_an_odd_total_is_counted_again(cache: NodeCache, remote: Remote, known: bytes | None) -> None:
    cache.read(remote.digests[:3], remote.fetch)
    total = cache.folder / ".total"
    if known is None:
        total.unlink()
    else:
        total.write_bytes(known)
    cache.read(remote.digests, remote.fetch)
    assert int(total.read_bytes()) == sum(copies(cache).values()) == sum(map(len, CONTENTS))


# ---------------------------------------------------------------------- room


def test_what_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    contents = [noise(1000, number) for number in range(12)]
    remote = Remote(contents)
    cache = NodeCache(tmp_path / "blobs", 10_000)
    for number, digest in enumerate(remote.digests[:10]):
        cache.read([digest], remote.fetch)
        os.utime(copy_of(cache, digest), (number, number))
    cache.read(remote.digests[:2], refuse)
    cache.read([remote.digests[10]], remote.fetch)
    left = copies(cache)
    assert {*remote.digests[:2], remote.digests[10]} <= left.keys()
    assert remote.digests[2] not in left
    assert sum(left.values()) <= 10_000


def test_it_stays_within_its_bound_and_gives_what_does_not_fit(tmp_path: Path) -> None:
    contents = [noise(300 + 37 * number, number) for number in range(60)]
    remote = Remote(contents)
    cache = NodeCache(tmp_path / "blobs", 5000)
    for digest, content in zip(remote.digests, contents, strict=True):
        assert got(cache, [digest], remote.fetch) == [content]
        assert sum(copies(cache).values()) <= 5000
    large = Remote([noise(5001)])
    for _ in range(2):
        assert got(cache, large.digests, large.fetch) == [noise(5001)]
    assert len(large.asked) == 2
    assert copies(cache)


def test_many_who_add_at_once_stay_within_the_bound(tmp_path: Path) -> None:
    remote = Remote([noise(1000, number) for number in range(100)])
    folder = tmp_path / "blobs"

    def add(part: int) -> None:
        cache = NodeCache(folder, 20_000)
        for digest in remote.digests[part::4]:
            assert got(cache, [digest], remote.fetch) == [content_of(remote, digest)]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    # What was being written when another thread counted may come on top.
    assert 10_000 <= sum(copies(NodeCache(folder, 0)).values()) <= 20_000 + 4 * 1000


def test_what_killed_processes_left_is_removed_when_space_is_needed(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "blobs", 3000)
    remote = Remote([noise(1000, number) for number in range(4)])
    cache.read(remote.digests[:1], remote.fetch)
    folder = copy_of(cache, remote.digests[0]).parent
    old, young, lock = folder / ".tmp-old", folder / ".tmp-young", folder / ".lock-old"
    for path in (old, young, lock):
        path.write_bytes(bytes(500))
    for path in (old, lock):
        os.utime(path, (1, 1))
    for digest in remote.digests[1:]:
        cache.read([digest], remote.fetch)
    assert [path.exists() for path in (old, young, lock)] == [False, True, False]


# ---------------------------------------------------------------------- several at once

# The fetch of each prints what it is asked for; they begin once all of them are ready.
READER = """
import random, sys
from pathlib import Path
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.node_cache import NodeCache

folder, seed = sys.argv[1:]
contents = {digest_bytes(content): content for number in range(48) if (content := b"%d" % number * 30_000)}
fetched = []

def fetch(digests):
    fetched.extend(digests)
    return [(contents[digest], digest) for digest in digests]

cache, order = NodeCache(Path(folder), 10**9), list(contents)
random.Random(int(seed)).shuffle(order)
print("ready", flush=True)
sys.stdin.readline()
while order:
    part = [order.pop() for _ in range(6)]
    assert cache.read(part, fetch) == [(contents[digest], digest) for digest in part]
print(*fetched, flush=True)
"""


def start(script: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def say(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def heard(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_8_processes_fetch_each_digest_once(cache: NodeCache) -> None:
    readers = [start(READER, str(cache.folder), str(seed)) for seed in range(8)]
    assert {heard(reader) for reader in readers} == {"ready"}
    for reader in readers:
        say(reader, "go")
    fetched = [reader.communicate(timeout=60)[0].split() for reader in readers]
    assert [reader.returncode for reader in readers] == [0] * 8
    assert len(copies(cache)) == 48
    assert sorted(itertools.chain.from_iterable(fetched)) == sorted(copies(cache))
    assert len([part for part in fetched if part]) > 1
    assert not [path for path in cache.folder.rglob(".*") if path.name != ".total"]


def test_threads_of_one_process_fetch_each_digest_once(cache: NodeCache) -> None:
    remote = Remote([noise(20_000, number) for number in range(40)])

    def read(part: int) -> None:
        order = remote.digests[part:] + remote.digests[:part]
        assert got(cache, order, remote.fetch) == [content_of(remote, digest) for digest in order]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(0, 40, 5)))
    assert sorted(itertools.chain.from_iterable(remote.asked)) == sorted(remote.digests)


# Takes a lock, says so, and does not come to an end.
HANGING = """
import sys
from pathlib import Path
from graphkiln.storage.node_cache import NodeCache

def fetch(digests):
    print("fetching", flush=True)
    sys.stdin.readline()

NodeCache(Path(sys.argv[1]), 10**9).read(sys.argv[2:], fetch)
"""


@pytest.fixture
def hanging(cache: NodeCache, remote: Remote) -> Iterator["subprocess.Popen[str]"]:
    """A process that is fetching everything and will never have done."""
    with start(HANGING, str(cache.folder), *remote.digests) as process:
        assert heard(process) == "fetching"
        yield process
        process.kill()


def test_when_who_fetches_is_killed_another_one_does(
    cache: NodeCache, remote: Remote, hanging: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = threading.Event()
    sleep = time.sleep

    def pause(seconds: float) -> None:
        waited.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", pause)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(got, cache, remote.digests, remote.fetch)
        assert waited.wait(30)
        assert not remote.asked
        hanging.kill()
        assert reading.result(30) == CONTENTS
    assert remote.asked == [remote.digests]


def test_nobody_waits_for_ever_nor_twice(
    cache: NodeCache, remote: Remote, hanging: "subprocess.Popen[str]", caplog: pytest.LogCaptureFixture
) -> None:
    impatient = NodeCache(cache.folder, ROOMY, patience_seconds=0.05)
    for digest, content in zip(remote.digests, CONTENTS, strict=True):
        assert got(impatient, [digest], remote.fetch) == [content]
    assert ["waiting no longer" in record.getMessage() for record in caplog.records] == [True]
    # What it has fetched is there for the others, who need not wait either.
    assert got(cache, remote.digests, refuse) == CONTENTS


# ---------------------------------------------------------------------- nothing that happens to it hurts


def test_deleted_while_it_is_used_it_is_made_again(cache: NodeCache, remote: Remote) -> None:
    def fetch_and_delete(digests: list[Digest]) -> list[Hashed]:
        shutil.rmtree(cache.folder.parent)
        return remote.fetch(digests)

    assert got(cache, remote.digests, fetch_and_delete) == CONTENTS
    assert got(cache, remote.digests, refuse) == CONTENTS
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_readers_while_it_is_emptied_get_what_they_want(cache: NodeCache) -> None:
    remote = Remote([noise(5000, number) for number in range(20)])
    done = threading.Event()

    def empty() -> None:
        while not done.is_set():
            for path in cache.folder.glob("??/*"):
                path.unlink(missing_ok=True)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(empty)
        try:
            for _ in range(5):
                assert got(cache, remote.digests, remote.fetch) == [
                    content_of(remote, digest) for digest in remote.digests
                ]
        finally:
            done.set()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Mount]:
    with small_disk(tmp_path / "mounted", "size=256k") as mounted:
        yield mounted


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_on_a_full_disk_a_run_goes_on_without_it(disk: Mount, caplog: pytest.LogCaptureFixture) -> None:
    contents = [noise(60_000, number) for number in range(8)]
    remote = Remote(contents)
    cache = NodeCache(disk.path / "node" / "blobs", ROOMY)
    for _ in range(2):
        for digest, content in zip(remote.digests, contents, strict=True):
            assert got(cache, [digest], remote.fetch) == [content]
    assert len(warnings_of(caplog)) == 1
    assert "No space left on device" in warnings_of(caplog)[0]
    # What fitted is whole, and used.
    kept = [Digest(name) for name in copies(cache)]
    assert kept
    assert got(cache, kept, refuse) == [content_of(remote, digest) for digest in kept]
    assert not list(cache.folder.rglob(".tmp-*"))


def test_a_read_only_cache_is_read(disk: Mount, remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    folder = disk.path / "node" / "blobs"
    NodeCache(folder, ROOMY).read(remote.digests[:2], remote.fetch)
    disk.remount("ro")
    cache = NodeCache(folder, ROOMY)
    for _ in range(2):
        assert got(cache, remote.digests, remote.fetch) == CONTENTS
    assert remote.asked[1:] == [remote.digests[2:]] * 2
    assert ["Read-only" in warning for warning in warnings_of(caplog)] == [True]
    disk.remount("rw")


def test_a_file_in_its_place_is_left_alone(tmp_path: Path, remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "node").write_text("mine")
    cache = NodeCache(tmp_path / "node" / "blobs", ROOMY)
    for _ in range(2):
        assert got(cache, remote.digests, remote.fetch) == CONTENTS
    assert (tmp_path / "node").read_text() == "mine"
    assert len(warnings_of(caplog)) == 1


def test_a_disk_without_hard_links_is_done_without(
    cache: NodeCache, remote: Remote, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse_link)
    assert got(cache, remote.digests, remote.fetch) == CONTENTS
    assert ["hard links" in warning for warning in warnings_of(caplog)] == [True]


# ---------------------------------------------------------------------- users


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_nobody_else_can_write_there(cache: NodeCache, remote: Remote, umask: int) -> None:
    before = os.umask(umask)
    try:
        cache.read(remote.digests, remote.fetch)
    finally:
        os.umask(before)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    cache.folder.chmod(0o777)
    cache.read([digest_bytes(b"more")], lambda _: [hashed(b"more")])
    assert cache.folder.stat().st_mode & 0o777 == 0o700


# Reads as another user; prints what it got, how often it fetched, and its warnings.
OTHER_USER = """
import logging, os, sys
from pathlib import Path
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.node_cache import NodeCache

logging.basicConfig(stream=sys.stdout, format="%(message)s")
os.setgid(65534)
os.setuid(65534)
cache = NodeCache(Path(sys.argv[1]), 10**9)
x = digest_bytes(b"x")
print([cache.read([x], lambda digests: [(b"x", x)]) == [(b"x", x)] for _ in range(2)])
"""


def test_another_users_cache_is_not_used(tmp_path: Path, cache: NodeCache, remote: Remote) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    cache.read(remote.digests, remote.fetch)
    cache.folder.parent.chmod(0o777)
    printed = start(OTHER_USER, str(cache.folder)).communicate(timeout=60)[0].splitlines()
    assert printed[-1] == "[True, True]"
    assert len(printed) == 2
    assert "going on without the node cache" in printed[0]
    assert got(cache, remote.digests, refuse) == CONTENTS


# ---------------------------------------------------------------------- where it is


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("GRAPHKILN_NODE_CACHE", "GRAPHKILN_NODE_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return monkeypatch


def test_it_is_where_the_environment_says(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = default_node_cache()
    assert found is not None
    assert found.folder == tmp_path / "graphkiln-node" / "blobs"
    assert 0 < found.max_bytes <= 50 * 10**9
    assert found.max_bytes <= shutil.disk_usage(tmp_path).total / 10
    assert default_node_cache() is found
    environment.setenv("GRAPHKILN_NODE_CACHE", str(tmp_path / "there"))
    environment.setenv("GRAPHKILN_NODE_CACHE_SIZE", "1.5GB")
    found = default_node_cache()
    assert found is not None
    assert (found.folder, found.max_bytes) == (tmp_path / "there" / "blobs", 1_500_000_000)
    environment.setenv("GRAPHKILN_NODE_CACHE", "off")
    assert default_node_cache() is None
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_gets_none_but_can_name_one(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    environment.delenv("XDG_CACHE_HOME")
    environment.setattr(Path, "home", no_home)
    assert default_node_cache() is None
    environment.setenv("GRAPHKILN_NODE_CACHE", str(tmp_path))
    assert default_node_cache() is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GRAPHKILN_NODE_CACHE", "s3://bucket/cache"),
        ("GRAPHKILN_NODE_CACHE", "~no-such-user/cache"),
        ("GRAPHKILN_NODE_CACHE_SIZE", "0"),
        ("GRAPHKILN_NODE_CACHE_SIZE", "-1"),
        ("GRAPHKILN_NODE_CACHE_SIZE", "much"),
        ("GRAPHKILN_NODE_CACHE_SIZE", "10 %"),
    ],
)
def test_a_place_or_size_that_is_none_is_refused(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(name, value)
    with pytest.raises(BadInputError, match=name) as caught:
        default_node_cache()
    assert caught.value.reason == "node-cache"
