"""One suite for every file system, and what only local disks promise."""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.conditional import ConditionalFilesystem
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import BadInputError, DamagedStoreError, GraphKilnError, StoreUnavailableError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.local import TEMPORARY_PREFIX, LocalFilesystem
from graphkiln.storage.locations import default_url, open_filesystem
from graphkiln.storage.remote import RemoteFilesystem
from graphkiln.storage.spill import SpillingFilesystem
from graphkiln.storage.store import Store, open_for_writing, open_store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import DictFilesystem, FullFilesystem
from tests.storage.mounts import Mount, small_disk
from tests.storage.samples import compile_toy, load_toy, noise

CONTENTS = [b"", b"x", b"line\r\n\x00\xff", noise(100_000)]

# ---------------------------------------------------------------------- every file system


ON_SERVERS = {
    "s3": ("in_s3", pytest.mark.s3),
    "gcs": ("in_gcs", pytest.mark.gcs),
    "azure": ("in_azure", pytest.mark.azure),
}
PARAMETERS = [pytest.param(name, marks=[mark, pytest.mark.xdist_group(name)]) for name, (_, mark) in ON_SERVERS.items()]


@pytest.fixture(params=["local", "memory", "dict", "full", *PARAMETERS])
def filesystem(
    request: pytest.FixtureRequest, tmp_path: Path, in_memory: Callable[[], StoreFilesystem]
) -> StoreFilesystem:
    """An empty file system of each kind, that of the tests included."""
    if request.param == "dict":
        return DictFilesystem({})
    if request.param == "full":
        return SpillingFilesystem(FullFilesystem({}, room=0))
    if request.param in ON_SERVERS:
        made: StoreFilesystem = request.getfixturevalue(ON_SERVERS[request.param][0])()
        return made
    return LocalFilesystem(tmp_path / "store") if request.param == "local" else in_memory()


def test_remove_compares(filesystem: StoreFilesystem) -> None:
    assert not filesystem.remove("a/b", expected=b"x")
    filesystem.create("a/b", b"x")
    assert not filesystem.remove("a/b", expected=b"y")
    assert filesystem.read("a/b") == b"x"
    assert filesystem.remove("a/b", expected=b"x")
    with pytest.raises(FileNotFoundError):
        filesystem.read("a/b")


def test_racing_threads_create_once_and_lose_no_update(filesystem: StoreFilesystem) -> None:
    """Not for ``memory://``, which is one process's, and whose writes are not guarded against its threads."""
    if type(filesystem) in (RemoteFilesystem, DictFilesystem):
        pytest.skip("no writer but this thread can be there")
    writers, rounds = 8, 5
    created: list[bool] = []
    filesystem.create("counter", b"0 by nobody")

    def write(number: int) -> None:
        created.append(filesystem.create("once", f"writer {number}".encode()))
        for _ in range(rounds):
            while True:
                current = filesystem.read("counter")
                # Writers of the same bytes could not be told apart, nor need they be.
                if filesystem.replace("counter", b"%d by %d" % (int(current.split()[0]) + 1, number), expected=current):
                    break

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False] * (writers - 1) + [True]
    assert int(filesystem.read("counter").split()[0]) == writers * rounds


@pytest.mark.parametrize("content", CONTENTS, ids=len)
def test_what_is_written_is_read(filesystem: StoreFilesystem, content: bytes) -> None:
    assert filesystem.create("a/b/created", content)
    assert filesystem.replace("a/b/replaced", content, expected=None)
    assert filesystem.read("a/b/created") == content
    assert filesystem.read("a/b/replaced") == content


def test_create_is_exclusive(filesystem: StoreFilesystem) -> None:
    assert filesystem.create("a", b"first")
    assert not filesystem.create("a", b"second")
    assert filesystem.read("a") == b"first"
    filesystem.delete("a")
    assert filesystem.create("a", b"third")
    assert filesystem.read("a") == b"third"


@pytest.mark.parametrize(
    ("there", "expected", "replaced"),
    [
        (None, None, True),
        (None, b"x", False),
        (None, b"", False),
        (b"x", b"x", True),
        (b"x", b"y", False),
        (b"x", None, False),
        (b"", None, False),
        (b"", b"", True),
    ],
)
def test_replace_compares(
    filesystem: StoreFilesystem, there: bytes | None, expected: bytes | None, replaced: bool
) -> None:
    if there is not None:
        filesystem.create("a/b", there)
    assert filesystem.replace("a/b", b"new", expected=expected) is replaced
    if replaced:
        assert filesystem.read("a/b") == b"new"
    elif there is None:
        with pytest.raises(FileNotFoundError):
            filesystem.read("a/b")
    else:
        assert filesystem.read("a/b") == there


def test_move_takes_an_object_away_once(filesystem: StoreFilesystem) -> None:
    filesystem.create("a/b", b"x")
    for other in (b"y", None):
        assert not filesystem.move("a/b", "c/d/e", expected=other)
    assert list(filesystem.names("")) == ["a/b"]
    assert filesystem.move("a/b", "c/d/e", expected=b"x")
    assert filesystem.read("c/d/e") == b"x"
    assert list(filesystem.names("")) == ["c/d/e"]
    for expected in (b"x", None):
        assert not filesystem.move("a/b", "c/f", expected=expected)
        assert not filesystem.move("never/was", "c/f", expected=expected)
    assert list(filesystem.names("")) == ["c/d/e"]


def test_nothing_is_lost_if_a_move_finds_its_destination_taken(in_memory: Callable[[], StoreFilesystem]) -> None:
    """Which a local disk's does not look for: the paths are made up by the caller."""
    filesystem = in_memory()
    filesystem.create("a", b"x")
    filesystem.create("b", b"y")
    with pytest.raises(FileExistsError):
        filesystem.move("a", "b", expected=b"x")
    assert [filesystem.read(path) for path in ("a", "b")] == [b"x", b"y"]
    filesystem.create("c", b"x")  # by a try whose answer was lost
    assert filesystem.move("a", "c", expected=b"x")
    assert list(filesystem.names("")) == ["b", "c"]


def test_delete_may_be_repeated(filesystem: StoreFilesystem) -> None:
    filesystem.create("a/b", b"x")
    for _ in range(2):
        filesystem.delete("a/b")
    filesystem.delete("never/was")
    assert list(filesystem.names("")) == []


@pytest.mark.parametrize("path", ["a", "a/b/c", "there/below"])
def test_what_is_not_there_cannot_be_read(filesystem: StoreFilesystem, path: str) -> None:
    filesystem.create("there", b"x")
    with pytest.raises(FileNotFoundError):
        filesystem.read(path)


def test_names_are_those_of_all_objects_below_a_folder_in_order(filesystem: StoreFilesystem) -> None:
    paths = ["b", "a/z", "a/b/c", "a.b", "a-b/c", "a/a", "ab/c", "A", "a/b.c", "é", "a/.hidden"]
    assert list(filesystem.names("")) == []
    for path in paths:
        filesystem.create(path, path.encode())
    assert list(filesystem.names("")) == sorted(paths)
    assert list(filesystem.names("a")) == sorted(path for path in paths if path.startswith("a/"))
    assert list(filesystem.names("a/b")) == ["a/b/c"]
    assert list(filesystem.names("none")) == []
    assert list(filesystem.names("a/none")) == []


def test_entries_tell_the_size_and_the_age_of_each_object(filesystem: StoreFilesystem) -> None:
    sizes = {"a/empty": 0, "a/b/one": 1, "large": 100_000}
    for path, size in sizes.items():
        filesystem.create(path, b"x" * size)
    found = list(filesystem.entries(""))
    assert [(entry.path, entry.size) for entry in found] == sorted(sizes.items())
    if isinstance(filesystem, DictFilesystem):
        return  # its clock stands still
    assert all(abs(entry.modified - time.time()) < 60 for entry in found)
    (before,) = filesystem.entries("a/b")
    assert filesystem.replace("a/b/one", b"xy", expected=b"x")
    (after,) = filesystem.entries("a/b")
    assert (after.path, after.size) == ("a/b/one", 2)
    assert after.modified >= before.modified


# More than are asked for at once, and than one would like to wait for one by one.
MANY = {f"many/{number % 7}/{number:03}": b"%d" % number * (number % 50) for number in range(200)}


def test_many_objects_are_written_read_and_deleted(filesystem: StoreFilesystem) -> None:
    assert filesystem.create_many(list(MANY.items())) == [True] * len(MANY)
    assert [entry.path for entry in filesystem.entries("many")] == sorted(MANY)
    backwards = dict(reversed(MANY.items()))
    assert filesystem.read_many(list(backwards)) == list(backwards.values())
    kept = [path for number, path in enumerate(MANY) if number % 10 == 0]
    filesystem.delete_many([path for path in MANY if path not in kept])
    assert list(filesystem.names("")) == sorted(kept)
    filesystem.delete_many([*MANY, "never/was"])
    assert list(filesystem.names("")) == []


def test_nothing_is_asked_of_no_objects(filesystem: StoreFilesystem) -> None:
    assert filesystem.create_many([]) == []
    assert filesystem.read_many([]) == []
    filesystem.delete_many([])


def test_of_many_objects_those_that_are_there_stay_as_they_are(filesystem: StoreFilesystem) -> None:
    there = {path: b"first" for number, path in enumerate(MANY) if number % 3 == 0}
    filesystem.create_many(list(there.items()))
    filesystem.replace("many/0/000", b"second", expected=b"first")
    assert filesystem.create_many(list(MANY.items())) == [path not in there for path in MANY]
    expected = {**MANY, **there, "many/0/000": b"second"}
    assert dict(zip(MANY, filesystem.read_many(list(MANY)), strict=True)) == expected


def test_of_many_objects_those_that_are_missing_hide_no_others(filesystem: StoreFilesystem) -> None:
    there = {path: data for number, (path, data) in enumerate(MANY.items()) if number % 2}
    filesystem.create_many(list(there.items()))
    for path, found in zip(MANY, filesystem.read_many(list(MANY)), strict=True):
        if path in there:
            assert found == there[path]
        else:
            assert isinstance(found, FileNotFoundError)


def test_racing_threads_create_each_of_many_once(filesystem: StoreFilesystem) -> None:
    if type(filesystem) in (RemoteFilesystem, DictFilesystem):
        pytest.skip("no writer but this thread can be there")
    paths = list(MANY)[:40]
    answers: list[list[bool | OSError]] = []

    def write(writer: int) -> None:
        answers.append(filesystem.create_many([(path, b"by %d" % writer) for path in paths]))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(of_one) for of_one in zip(*answers, strict=True)] == [[False, False, False, True]] * len(paths)


def test_nothing_but_objects_is_left(filesystem: StoreFilesystem) -> None:
    filesystem.create("a/b", b"x")
    filesystem.create("a/b", b"y")
    filesystem.replace("a/b", b"y", expected=b"z")
    filesystem.replace("a/b", b"z", expected=b"x")
    filesystem.replace("a/c", b"z", expected=None)
    filesystem.move("a/c", "a/d", expected=b"z")
    assert list(filesystem.names("")) == ["a/b", "a/d"]


def test_sync_takes_any_number_of_objects(filesystem: StoreFilesystem) -> None:
    filesystem.create("a/b", b"x")
    filesystem.create("c", b"x")
    filesystem.sync([])
    filesystem.sync(["a/b", "c", "a/b"])


def test_a_second_one_on_the_same_place_sees_the_same(filesystem: StoreFilesystem) -> None:
    if isinstance(filesystem, DictFilesystem | SpillingFilesystem):
        pytest.skip("it has no place")
    options = filesystem._fs.storage_options if isinstance(filesystem, ConditionalFilesystem) else {}
    again = open_filesystem(filesystem.url, options)
    assert type(again) is type(filesystem)
    assert list(again.names("")) == []
    filesystem.create("a/b", b"x")
    assert again.read("a/b") == b"x"
    assert list(again.names("")) == ["a/b"]
    assert not again.create("a/b", b"y")


def test_readers_in_other_threads_see_whole_objects(filesystem: StoreFilesystem) -> None:
    """A writer changes one object between two contents, and nobody sees anything else."""
    contents = [bytes([number]) * 50_000 for number in range(2)]
    filesystem.replace("a", contents[0], expected=None)
    seen: set[bytes] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(filesystem.read("a"))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(60):
        filesystem.replace("a", contents[(number + 1) % 2], expected=contents[number % 2])
    done.set()
    for reader in readers:
        reader.join()
    assert seen <= set(contents)


# ---------------------------------------------------------------------- URLs


def test_paths_and_file_urls_are_local(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}"):
        opened = open_filesystem(url)
        assert isinstance(opened, LocalFilesystem)
        assert opened.url == str(tmp_path)


def test_opening_touches_nothing(tmp_path: Path) -> None:
    Store(open_filesystem(str(tmp_path / "none"))).read_format()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        (ValueError("no such protocol in failing://me:hunter2@host"), BadInputError, "store-url"),
        (ImportError("install failingfs"), BadInputError, "store-url"),
        (TypeError("no such option"), BadInputError, "store-url"),
        (OSError(errno.EHOSTUNREACH, "no way to host for hunter2"), StoreUnavailableError, "store-io"),
        (RuntimeError("login of me:hunter2 refused"), StoreUnavailableError, "store-io"),
    ],
    ids=repr,
)
def test_what_cannot_be_opened_says_so_without_the_password(
    fault: Exception, kind: type[GraphKilnError], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(url: str, **options: Any) -> Any:
        raise fault

    monkeypatch.setattr(fsspec, "url_to_fs", refuse)
    with pytest.raises(kind) as caught:
        open_filesystem("failing://me:hunter2@host/x")
    assert caught.value.reason == reason
    assert "hunter2" not in str(caught.value)
    assert "failing://me@host/x" in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_protocol_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BadInputError) as caught:
        open_filesystem("unheard-of://host/x")
    assert caught.value.reason == "store-url"


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """Fails like the libraries behind fsspec, each in its own words."""

    protocol = "failing"
    fault: Exception | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.rpartition("://")[2].partition("/")[2].strip("/")

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        self._fail()
        data: bytes = super().cat_file(path, *arguments, **options)
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._fail()
        super().pipe_file(path, value, mode=mode, **options)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._fail()
        return super().find(path, *arguments, **options)


@pytest.fixture
def failing() -> Iterator[tuple[RemoteFilesystem, type[Failing]]]:
    fsspec.register_implementation("failing", Failing, clobber=True)
    kept = dict(MemoryFileSystem.store)
    yield RemoteFilesystem("failing://me:hun@ter2@host/failing-store", {}), Failing
    Failing.fault = None
    MemoryFileSystem.store.clear()
    MemoryFileSystem.store.update(kept)


def test_a_password_is_in_no_url_and_in_no_message(failing: tuple[RemoteFilesystem, type[Failing]]) -> None:
    filesystem, fake = failing
    store = Store(filesystem)
    assert store.url == "failing://me@host/failing-store"
    fake.fault = RuntimeError("cannot log in to failing://me:hun@ter2@host")
    for use in (lambda: store.put_blob(b"x"), store.read_format, lambda: list(store.names(""))):
        with pytest.raises(StoreUnavailableError) as caught:
            use()
        assert "hun@ter2" not in str(caught.value)
        assert "cannot log in" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a@b:c@d",
        "memory://x",
        "abfs://container@account.dfs.core.windows.net/path",
        "http://host:8080/a@b",
        "ftp://user@host/x",
    ],
)
def test_urls_without_a_password_stay_as_they_are(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec, "url_to_fs", lambda url, **options: (None, "root"))
    assert RemoteFilesystem(url, {}).url == url


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        (RuntimeError("endpoint"), StoreUnavailableError, "store-io"),
        (OSError(errno.EIO, "broken"), StoreUnavailableError, "store-io"),
        (TimeoutError("slow"), StoreUnavailableError, "store-io"),
        (OSError(errno.ENOSPC, "full"), StoreUnavailableError, "disk-full"),
        (OSError(errno.EDQUOT, "full"), StoreUnavailableError, "disk-full"),
        (PermissionError("without a number"), BadInputError, "store-not-accessible"),
        (OSError(errno.EROFS, "read-only"), BadInputError, "store-not-accessible"),
        (OSError(errno.EINVAL, "invalid"), StoreUnavailableError, "store-io"),
    ],
    ids=repr,
)
def test_faults_of_any_library_become_errors_that_say_what_to_do(
    failing: tuple[RemoteFilesystem, type[Failing]], fault: Exception, kind: type[GraphKilnError], reason: str
) -> None:
    filesystem, fake = failing
    store = Store(filesystem)
    fake.fault = fault
    for use in (lambda: store.put_blob(b"x"), store.read_format, lambda: list(store.names(""))):
        with pytest.raises(kind) as caught:
            use()
        assert caught.value.reason == reason
        assert caught.value.retryable is (kind is StoreUnavailableError)
        assert str(fault.args[-1]) in str(caught.value)


def test_a_lost_race_that_is_told_as_an_invalid_argument_is_a_lost_race(
    failing: tuple[RemoteFilesystem, type[Failing]],
) -> None:
    filesystem, fake = failing
    assert filesystem.create("a", b"x")
    fake.fault = OSError(errno.EINVAL, "precondition")
    assert not filesystem.create("a", b"y")
    with pytest.raises(OSError):
        filesystem.create("b", b"y")


# ---------------------------------------------------------------------- local disks


@pytest.fixture
def local(tmp_path: Path) -> LocalFilesystem:
    return LocalFilesystem(tmp_path / "store")


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775)])
def test_modes_follow_the_umask_so_that_a_second_user_can_read(
    local: LocalFilesystem, umask: int, file_mode: int, folder_mode: int
) -> None:
    before = os.umask(umask)
    try:
        local.create("a/created", b"x")
        local.replace("a/replaced", b"x", expected=None)
        local.create("a/moving", b"x")
        local.move("a/moving", "b/c/moved", expected=b"x")
    finally:
        os.umask(before)
    root = Path(local.url)
    for path in ("a/created", "a/replaced", "b/c/moved"):
        assert (root / path).stat().st_mode & 0o777 == file_mode
    for path in ("", "a", "b", "b/c"):
        assert (root / path).stat().st_mode & 0o777 == folder_mode


def test_odd_things_among_many_objects_hide_no_others(local: LocalFilesystem) -> None:
    filesystem = local
    filesystem.create_many(list(MANY.items()))
    root = Path(local.url)
    odd = list(MANY)[10:13]
    for path in odd:
        (root / path).unlink()
    (root / odd[0]).mkdir()
    os.mkfifo(root / odd[1])
    (root / odd[2]).symlink_to("nowhere")
    for path, found in zip(MANY, filesystem.read_many(list(MANY)), strict=True):
        if path in odd:
            assert isinstance(found, DamagedStoreError)
        else:
            assert found == MANY[path]
    assert filesystem.create_many([(path, b"x") for path in MANY]) == [False] * len(MANY)
    filesystem.delete_many(list(MANY))
    assert (root / odd[0]).is_dir()
    assert list(filesystem.names("")) == []


def test_a_fault_of_the_disk_ends_the_writing_of_many(local: LocalFilesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = os.write, 0

    def full(descriptor: int, data: Any) -> int:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(errno.ENOSPC, "no space")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    *before, fourth, last = local.create_many([(path, b"x") for path in list(MANY)[:5]])
    assert before == [True] * 3
    assert isinstance(fourth, OSError)
    assert fourth is last
    assert written == 4
    assert list(local.names("")) == sorted(list(MANY)[:3])
    with pytest.raises(StoreUnavailableError) as caught:
        Store(local).put_blobs([b"x", b"y"])
    assert caught.value.reason == "disk-full"


def test_an_object_that_grows_while_it_is_read_is_read_whole(
    local: LocalFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network file system tells an old size."""
    local.create("a", b"x" * 100)
    status = os.fstat

    def older(descriptor: int) -> os.stat_result:
        fields = list(status(descriptor))
        fields[6] = 50
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", older)
    assert local.read("a") == b"x" * 100


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(
    local: LocalFilesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.create("refs/toy/host/x", b"x")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).rstrip("/").endswith("toy"):
            raise PermissionError(errno.EACCES, "not yours", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(BadInputError) as caught:
        list(Store(local).names("refs"))
    assert caught.value.reason == "store-not-accessible"


def test_sync_of_what_is_gone_is_a_fault(local: LocalFilesystem) -> None:
    with pytest.raises(StoreUnavailableError):
        Store(local).sync(["blobs/none"])


@pytest.mark.parametrize("where", ["", "below"])
def test_a_store_path_that_is_a_file_is_refused_with_a_reason(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    url = str(tmp_path / "file" / where)
    with pytest.raises(BadInputError) as caught:
        open_for_writing(url)
    assert caught.value.reason == "store-not-accessible"
    assert (tmp_path / "file").read_bytes() == b"x"
    assert open_store(url).read_format() is None


# Started by each of the racers below; they begin once all of them are ready.
RACER = """
import sys
from graphkiln.storage.local import LocalFilesystem
store = LocalFilesystem(sys.argv[1])
name = sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
"""

CREATE = (
    RACER
    + """
won = [number for number in range(20) if store.create(f"a/{number}", name.encode() * 50_000)]
print(*won, flush=True)
"""
)

INCREMENT = (
    RACER
    + """
for _ in range(25):
    while True:
        try:
            current = store.read("counter")
        except FileNotFoundError:
            current = None
        if store.replace("counter", b"%d" % (int(current or 0) + 1), expected=current):
            break
"""
)


def _race(script: str, root: str, racers: int) -> list[str]:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, root, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(racers)
    ]
    for racer in started:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in started:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate()[0] for racer in started]
    assert [racer.returncode for racer in started] == [0] * racers
    return answers


def test_of_many_processes_that_create_one_object_exactly_one_wins(local: LocalFilesystem) -> None:
    answers = _race(CREATE, local.url, 4)
    winners = {int(number): str(racer) for racer, won in enumerate(answers) for number in won.split()}
    assert sorted(number for won in answers for number in won.split()) == sorted(map(str, range(20)))
    for number, racer in winners.items():
        assert local.read(f"a/{number}") == racer.encode() * 50_000
    assert len(list(local.names(""))) == 20


def test_no_update_of_many_processes_is_lost(local: LocalFilesystem) -> None:
    _race(INCREMENT, local.url, 4)
    assert local.read("counter") == b"100"
    assert list(local.names("")) == ["counter"]


WRITER = """
import itertools, random, sys
from graphkiln.storage.conditional import ConditionalFilesystem
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.local import LocalFilesystem
store = LocalFilesystem(sys.argv[1])
noise = random.Random(int(sys.argv[2]))
current = None
for number in itertools.count():
    data = noise.randbytes(400_000)
    data = digest_bytes(data).encode() + data
    print(number, flush=True)
    store.create(f"created/{digest_bytes(data)}", data)
    if store.replace("replaced", data, expected=current):
        current = data
"""


def test_a_writer_killed_at_work_leaves_whole_objects_and_temporaries(tmp_path: Path) -> None:
    for round_of in range(6):
        local = LocalFilesystem(tmp_path / str(round_of))
        command = [sys.executable, "-c", WRITER, local.url, str(round_of)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(3 + round_of):
                assert writer.stdout.readline()
            writer.kill()
        seen = 0
        for path in local.names(""):
            if path.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
                continue
            data = local.read(path)
            assert data[:64].decode() == digest_bytes(data[64:]), f"{path} is torn"
            assert path == "replaced" or path == f"created/{digest_bytes(data)}"
            seen += 1
        assert seen >= 2
        # Nothing that the dead writer held stands in the way of the next one.
        assert local.replace("replaced", b"next", expected=local.read("replaced"))


# ---------------------------------------------------------------------- disks that are full or read-only


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A file system of 1 MB."""
    with small_disk(tmp_path / "mounted", "size=1m") as mounted:
        yield mounted


def test_on_a_full_disk_nothing_half_is_visible_and_work_goes_on_once_there_is_space(mount: Mount) -> None:
    url = str(mount.path / "store")
    store = open_for_writing(url)
    complete = compile_toy(store)
    expected = load_toy(store, complete.variant)
    refs: list[BlobRef] = []
    with pytest.raises(StoreUnavailableError, match="no space left") as caught:
        refs.extend(store.put_blob(noise(150_000, number)) for number in range(100))
    assert caught.value.reason == "disk-full"
    assert caught.value.retryable
    assert refs
    mount.fill()

    # Nor may anything that was there be lost for want of space.
    plan = store.read_plan(*complete.variant)
    ref = store.read_ref(*complete.variant)
    assert plan is not None
    assert ref is not None
    with pytest.raises(StoreUnavailableError):
        store.write_plan(type(plan)(plan.plan, plan.created_at, None))
    assert store.read_plan(*complete.variant) == plan
    assert verify_store(store).problems == ()
    assert load_toy(open_store(url), complete.variant) == expected

    mount.empty()
    (Path(url) / layout.by_digest(layout.BLOBS, refs[0].digest)).unlink()
    assert store.get_blob(store.put_blob(noise(150_000, 0)), "a blob") == noise(150_000, 0)
    assert verify_store(store).problems == ()


def test_a_read_only_store_is_read_and_not_prepared_for_writing(mount: Mount) -> None:
    url = str(mount.path / "store")
    complete = compile_toy(open_for_writing(url))
    mount.remount("ro")
    assert load_toy(open_store(url), complete.variant)
    assert verify_store(open_store(url)).problems == ()
    for url_to_write in (url, str(mount.path / "another")):
        with pytest.raises(BadInputError, match="Read-only") as caught:
            open_for_writing(url_to_write)
        assert caught.value.reason == "store-not-accessible"
    mount.remount("rw")
    assert [path for path in open_store(url).names("") if TEMPORARY_PREFIX in path] == []


def test_the_default_store_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHKILN_STORE", "memory://named")
    assert default_url() == "memory://named"
    monkeypatch.delenv("GRAPHKILN_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_url() == str(tmp_path / "graphkiln")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_url() == str(tmp_path / ".cache" / "graphkiln")
