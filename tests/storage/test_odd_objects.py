"""What no writer makes: folders, pipes and links in the place of objects. They are damage, and heal."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from graphkiln.storage import layout
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import BadInputError, DamagedStoreError
from graphkiln.storage.filesystem import open_filesystem
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.store import default_url, open_for_writing
from graphkiln.storage.verify import verify_store
from tests.storage.samples import OUTPUTS, compile_toy, load_toy, make_complete

ODD: dict[str, Callable[[Path], None]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
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
        assert verify_store(open_for_writing(str(root))).problems
    variant = compile_toy(open_for_writing(str(root))).variant
    assert load_toy(open_for_writing(str(root)), variant) == OUTPUTS


def test_a_store_whose_format_file_is_lost_is_noticed_whatever_else_is_there(tmp_path: Path) -> None:
    store = open_for_writing(str(tmp_path / "store"))
    store.put_blob(b"content")
    (tmp_path / "store" / layout.FORMAT).unlink()
    with pytest.raises(DamagedStoreError, match="is missing, though the store is in use"):
        store.read_format()


@pytest.mark.parametrize("url", ["file:/tmp/x", "s3:bucket/prefix"])
def test_a_url_without_its_slashes_is_refused(url: str) -> None:
    with pytest.raises(BadInputError, match="did you mean"):
        open_filesystem(url)


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


def test_digests_of_odd_objects_are_never_taken(tmp_path: Path) -> None:
    store = open_for_writing(str(tmp_path / "store"))
    path = tmp_path / "store" / layout.by_digest(layout.BLOBS, digest_bytes(b"content"))
    path.parent.mkdir(parents=True)
    path.mkdir()
    assert store.get_blob(store.put_blob(b"content"), "a blob") == b"content"
