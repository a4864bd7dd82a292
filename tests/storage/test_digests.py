from pathlib import Path

import msgspec
import pytest

from graphkiln.storage.digests import Digest, digest_bytes, digest_file, is_digest

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
    assert is_digest(digest)


def test_a_file_that_cannot_be_read_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        digest_file(tmp_path / "missing")


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
