"""What only S3 brings: servers that ignore conditions, and replies that are lost."""

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.s3 import S3Filesystem
from graphkiln.storage.store import Store, open_for_writing, open_store
from tests.storage.s3_servers import BUCKET, nanio, options_for

pytestmark = [pytest.mark.s3, pytest.mark.xdist_group("s3")]


def test_a_server_that_ignores_conditions_is_refused_by_writers_and_read_by_readers(tmp_path: Path) -> None:
    with nanio(tmp_path / "data") as endpoint:
        options = options_for(endpoint)
        fsspec.filesystem("s3", **options).mkdir(BUCKET)
        with pytest.raises(BadInputError, match="ignores conditional writes") as caught:
            open_for_writing(f"s3://{BUCKET}/store", options)
        assert caught.value.reason == "no-conditional-writes"
        store = open_store(f"s3://{BUCKET}/store", options)
        assert list(store.names("")) == []


def test_a_store_on_s3_is_prepared_once_and_leaves_no_probe(in_s3: Callable[[], StoreFilesystem]) -> None:
    filesystem = in_s3()
    for _ in range(2):
        Store(filesystem).prepare_for_writing()
        assert list(filesystem.names("")) == ["graphkiln-store.json"]


@pytest.mark.parametrize("content", [b"", b"some bytes"])
def test_a_replace_whose_reply_was_lost_is_recognised_as_ours(
    in_s3: Callable[[], StoreFilesystem], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = in_s3()
    assert isinstance(filesystem, S3Filesystem)
    filesystem.create("ref", b"before")
    put = filesystem._put
    answers: list[bool] = []

    async def repeated(path: str, data: bytes, version: str | None) -> bool:
        """As a client does that has not heard the server's first answer."""
        answers.extend([await put(path, data, version), await put(path, data, version)])
        return answers[-1]

    monkeypatch.setattr(filesystem, "_put", repeated)
    assert filesystem.replace("ref", content, expected=b"before")
    assert answers == [True, False]
    assert filesystem.read("ref") == content


def test_objects_of_other_clients_are_seen_at_once(in_s3: Callable[[], StoreFilesystem]) -> None:
    reader = in_s3()
    assert isinstance(reader, S3Filesystem)
    writer = S3Filesystem(reader.url, reader._fs.storage_options)
    for number in range(3):
        assert len(list(reader.names("blobs"))) == number
        writer.create(f"blobs/{number}", b"x" * number)
        assert reader.read(f"blobs/{number}") == b"x" * number
