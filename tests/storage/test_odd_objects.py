"""What no writer makes: folders, pipes and links in the place of objects. They are damage, and heal."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from graphkiln.storage import layout
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import BadInputError, DamagedStoreError, StoreUnavailableError
from graphkiln.storage.leases import LeaseRecord, Leases, Observation
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.locations import default_url, open_filesystem
from graphkiln.storage.objects import CREATE_TRIES
from graphkiln.storage.remote import RemoteFilesystem
from graphkiln.storage.store import Store, open_for_writing
from graphkiln.storage.verify import verify_store
from tests.storage.samples import OUTPUTS, blob_ref, compile_toy, load_toy, make_complete, plan_of, result_of


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # an address takes about a hundred characters
        made.bind(path.name)


def _full_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"x")


ODD: dict[str, Callable[[Path], None]] = {
    "folder": Path.mkdir,
    "folder with something in it": _full_folder,
    "pipe": os.mkfifo,
    "socket": _socket,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("what", ["ref", "plan", "manifest", "forward action", "forward executable", "log", "format"])
def test_an_odd_object_is_damage_that_the_next_run_mends(odd: str, what: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    path = root / make_complete(open_for_writing(str(root))).paths[what]
    path.unlink()
    ODD[odd](path)
    with pytest.raises(DamagedStoreError, match="not a file"):
        LocalFilesystem(root).read(path.relative_to(root).as_posix())
    if what != "format":  # to open the store for writing has mended that one
        problems = verify_store(open_for_writing(str(root))).problems
        assert [problem.severity for problem in problems if root / problem.path == path] == ["damage"]
    variant = compile_toy(open_for_writing(str(root))).variant
    assert load_toy(open_for_writing(str(root)), variant) == OUTPUTS


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_failure_record_stands_in_nobodys_way(odd: str, tmp_path: Path) -> None:
    store = open_for_writing(str(tmp_path))
    key = digest_bytes(b"failed")
    path = tmp_path / layout.by_digest(layout.FAILURES, key)
    ways: list[Callable[[], object]] = [
        lambda: store.drop_failure(key),
        lambda: store.mend(lambda: store.read_failure(key)),
    ]
    for get_rid in ways:
        path.parent.mkdir(parents=True, exist_ok=True)
        ODD[odd](path)
        get_rid()
        assert not os.path.lexists(path)
        assert store.read_failure(key) is None


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_lease_is_nobodys(odd: str, tmp_path: Path) -> None:
    store = open_for_writing(str(tmp_path))
    key = digest_bytes(b"action")
    path = tmp_path / layout.by_digest(layout.LEASES, key)
    path.parent.mkdir(parents=True)
    ODD[odd](path)
    with Leases(store) as leases:
        seen = leases.take(key)
        assert isinstance(seen, Observation)
        lease = leases.take(key, seen)
        assert isinstance(lease, LeaseRecord)
        path.unlink()
        ODD[odd](path)  # while it is held: it can be neither renewed nor given back
        leases.renew()
        leases.release(lease)
    assert os.path.lexists(path)


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_object_is_never_the_one_that_a_writer_expects(odd: str, tmp_path: Path) -> None:
    filesystem = LocalFilesystem(tmp_path)
    ODD[odd](tmp_path / "a")
    assert not filesystem.create("a", b"x")
    for expected in (None, b""):
        assert not filesystem.replace("a", b"x", expected=expected)
    assert not filesystem.remove("a", expected=b"")
    assert not filesystem.move("a", "away/a", expected=b"")
    assert filesystem.move("a", "away/a", expected=None)
    assert os.path.lexists(tmp_path / "away" / "a")
    assert filesystem.create("a", b"x")


class Spoiling(LocalFilesystem):
    """A disk on which whatever is created is spoilt at once, this many times."""

    def __init__(self, root: Path, times: int) -> None:
        super().__init__(root)
        self._times = times

    def create(self, path: str, data: bytes) -> bool:
        if self._times and not path.startswith(layout.QUARANTINE):
            self._times -= 1
            super().create(path, b"spoilt by somebody else")
        return super().create(path, data)


def test_what_is_spoilt_again_and_again_is_no_success(tmp_path: Path) -> None:
    whole = open_for_writing(str(tmp_path / "whole"))
    manifest = whole.read_manifest(make_complete(whole).manifest)
    writes: list[Callable[[Store], object]] = [
        lambda store: store.put_blob(b"content"),
        lambda store: store.write_manifest(manifest),
    ]
    for times in (CREATE_TRIES - 1, CREATE_TRIES):
        for number, write in enumerate(writes):
            filesystem = Spoiling(tmp_path / f"{times}-{number}", times)
            store = Store(filesystem)
            if times < CREATE_TRIES:
                write(store)
                left = [path for path in filesystem.names("") if "quarantine" not in path]
                assert left
                assert not any(b"spoilt" in filesystem.read(path) for path in left)
            else:
                with pytest.raises(StoreUnavailableError, match="times in a row") as caught:
                    write(store)
                assert (caught.value.reason, caught.value.retryable) == ("contended", True)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_disk_without_hard_links_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(BadInputError, match="has no hard links: use another place") as caught:
        open_for_writing(str(tmp_path / "store"))
    assert caught.value.reason == "no-hard-links"
    assert list(LocalFilesystem(tmp_path / "store").names("")) == []


@pytest.mark.parametrize("what", ["blob", "action"])
def test_a_store_whose_format_file_is_lost_is_noticed_whatever_else_is_there(what: str, tmp_path: Path) -> None:
    store = open_for_writing(str(tmp_path / "store"))
    if what == "blob":
        store.put_blob(b"content")
    else:
        plan = plan_of({"forward": blob_ref(b"payload")})
        store.write_action(result_of(plan, plan.graphs[0], {"out": blob_ref(b"out")}, None))
    (tmp_path / "store" / layout.FORMAT).unlink()
    with pytest.raises(DamagedStoreError, match="is missing, though the store is in use"):
        store.read_format()


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("file:/tmp/x", "file:///tmp/x"),
        ("s3:bucket/prefix", "s3://bucket/prefix"),
        ("s3:/bucket/prefix", "s3://bucket/prefix"),
    ],
)
def test_a_url_without_its_slashes_is_refused(url: str, meant: str) -> None:
    with pytest.raises(BadInputError, match=f"did you mean {meant}, or the path ./{url}") as caught:
        open_filesystem(url)
    assert caught.value.reason == "store-url"


def test_a_path_with_a_colon_and_a_chained_url_are_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_filesystem("./s3:bucket").url == str(tmp_path / "s3:bucket")
    chained = open_filesystem("simplecache::memory://chained", {"simplecache": {"cache_storage": str(tmp_path)}})
    assert isinstance(chained, RemoteFilesystem)


def test_a_local_store_takes_no_options(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="takes no options: endpoint_url"):
        open_filesystem(str(tmp_path), {"endpoint_url": "x"})


def test_a_user_without_a_home_is_told_to_name_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GRAPHKILN_STORE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(BadInputError, match="GRAPHKILN_STORE"):
        default_url()
    monkeypatch.setenv("GRAPHKILN_STORE", "somewhere")
    assert default_url() == "somewhere"


def test_a_store_below_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(BadInputError, match="give its full path") as caught:
        open_filesystem("~no-such-user/store")
    assert caught.value.reason == "store-url"


def test_digests_of_odd_objects_are_never_taken(tmp_path: Path) -> None:
    store = open_for_writing(str(tmp_path / "store"))
    path = tmp_path / "store" / layout.by_digest(layout.BLOBS, digest_bytes(b"content"))
    path.parent.mkdir(parents=True)
    path.mkdir()
    assert store.get_blob(store.put_blob(b"content"), "a blob") == b"content"
