import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from graphkiln.storage import digests, local
from graphkiln.storage.digests import Digest, digest_bytes, digest_file, is_digest, read_with_digest
from graphkiln.storage.local import LocalFilesystem
from tests.storage.samples import noise

# The published test vectors of BLAKE3: the input is 0, 1, …, 250, 0, 1, … of this length.
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1023: "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2049: "5f4d72f40d7a5f82b15ca2b2e44b1de3c2ef86c426c95c1af0b6879522563030",
    8193: "bab6c09cb8ce8cf459261398d2e7aef35700bf488116ceb94a36d0f5f1b7bc3b",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


class Named(msgspec.Struct):
    digest: Digest


def _input(length: int) -> bytes:
    return (bytes(range(251)) * (length // 251 + 1))[:length]


@pytest.mark.parametrize(("length", "digest"), VECTORS.items())
def test_digests_are_those_that_the_authors_of_blake3_published(length: int, digest: str, tmp_path: Path) -> None:
    data = _input(length)
    (tmp_path / "file").write_bytes(data)
    assert digest_bytes(data) == digest
    assert digest_bytes(memoryview(data)) == digest
    assert digest_file(tmp_path / "file") == digest
    assert LocalFilesystem(tmp_path).read_with_digest("file") == (data, digest)
    assert is_digest(digest)


def test_a_file_that_cannot_be_read_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        digest_file(tmp_path / "missing")


PIECE = digests._PIECE


def opened(path: Path, read: Callable[[int, int], tuple[bytes, Digest]]) -> tuple[bytes, Digest]:
    with path.open("rb") as file:
        return read(file.fileno(), path.stat().st_size)


SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, digests._HASH_IN_THREADS_FROM, 5 * PIECE + 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_read_with_its_digest(size: int, tmp_path: Path) -> None:
    data = noise(size)
    (tmp_path / "file").write_bytes(data)
    expected = digest_file(tmp_path / "file")
    assert opened(tmp_path / "file", read_with_digest) == (data, expected)
    assert LocalFilesystem(tmp_path).read_with_digest("file") == (data, expected)
    assert digest_bytes(data) == expected


def test_large_files_are_hashed_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "HASH_WHILE_READING_FROM", PIECE)
    monkeypatch.setattr(local, "digest_bytes", None)
    data = noise(PIECE)
    (tmp_path / "large").write_bytes(data)
    assert LocalFilesystem(tmp_path).read_with_digest("large") == (data, digest_bytes(data))
    (tmp_path / "small").write_bytes(data[1:])
    with pytest.raises(TypeError, match="not callable"):
        LocalFilesystem(tmp_path).read_with_digest("small")


def test_what_is_hashed_is_what_is_returned_though_others_write_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole file is overwritten whenever a piece of it is about to be hashed."""
    path = tmp_path / "file"
    path.write_bytes(noise(4 * PIECE))
    hasher = blake3()

    class Overwriting:
        def update(self, piece: memoryview) -> None:
            with path.open("r+b") as file:
                file.write(noise(4 * PIECE, len(piece)))
            hasher.update(piece)

        def hexdigest(self) -> str:
            return hasher.hexdigest()

    monkeypatch.setattr(digests, "blake3", Overwriting)
    data, digest = opened(path, read_with_digest)
    assert digest == blake3(data).hexdigest()


@pytest.mark.parametrize("change", [-100, 0, 4])
def test_a_file_that_becomes_shorter_or_longer_is_read_to_its_end(change: int, tmp_path: Path) -> None:
    size = 3 * PIECE
    path = tmp_path / "file"
    path.write_bytes(noise(size))
    data, digest = opened(path, lambda descriptor, _: read_with_digest(descriptor, size + change))
    assert data == path.read_bytes()
    assert digest == digest_bytes(data)


def test_a_large_file_is_not_in_memory_twice(tmp_path: Path) -> None:
    size = 8 * PIECE
    (tmp_path / "file").write_bytes(bytes(size))
    tracemalloc.start()
    try:
        data, _ = opened(tmp_path / "file", read_with_digest)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == len(data) <= peak < 1.1 * size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 63,
        "a" * 65,
        "A" * 64,
        "g" * 64,
        "a" * 64 + "\n",
        "\n" + "a" * 64,
        " " + "a" * 63,
        "٣" * 64,
        "../" * 21,
    ],
    ids=ascii,
)
def test_other_text_is_no_digest_and_no_document_may_hold_it_for_one(text: str) -> None:
    assert not is_digest(text)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"digest": text}, Named)
