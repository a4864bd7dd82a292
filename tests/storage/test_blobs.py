from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from graphkiln.storage import blobs
from graphkiln.storage.blobs import BlobRef, decode, encode
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.errors import DamagedStoreError
from tests.storage.samples import QUICK, flipped, noise

contents = st.one_of(
    st.binary(max_size=100),
    st.builds(lambda part, times: part * times, st.binary(min_size=1, max_size=50), st.integers(0, 500)),
    st.integers(4000, 5000).map(noise),
)


@QUICK
@given(contents)
def test_what_is_encoded_comes_back(content: bytes) -> None:
    ref, stored = encode(content)
    assert decode(ref, stored) == content
    assert ref.digest == digest_bytes(stored)
    assert ref.content_digest == digest_bytes(content)
    assert (ref.stored_size, ref.size) == (len(stored), len(content))
    assert len(stored) <= len(content)


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        pytest.param(b"", "identity", id="empty"),
        pytest.param(b"a" * 4095, "identity", id="small"),
        pytest.param(b"a" * 4096, "zstd", id="large"),
        pytest.param(noise(5000), "identity", id="noise"),
    ],
)
def test_only_what_is_large_and_repeats_is_compressed(content: bytes, encoding: str) -> None:
    assert encode(content)[0].encoding == encoding


def test_repeats_far_apart_are_found() -> None:
    weights = noise(12_000_000)
    _, stored = encode(weights * 2)
    assert len(stored) < 1.1 * len(weights)


def _refuse(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a byte reached the decompressor before it was checked")


SHORT_AND_LONG = pytest.mark.parametrize("content", [b"short " * 3, b"what repeats " * 500], ids=["identity", "zstd"])


@SHORT_AND_LONG
def test_every_flipped_bit_is_refused_before_decompression(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, stored = encode(content)
    monkeypatch.setattr(blobs, "_decompress", _refuse)
    for position in range(len(stored)):
        for bit in range(8):
            with pytest.raises(DamagedStoreError) as caught:
                decode(ref, flipped(stored, position, 1 << bit))
            assert caught.value.reason == "wrong-digest"


@SHORT_AND_LONG
def test_every_other_length_is_refused_before_decompression(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, stored = encode(content)
    monkeypatch.setattr(blobs, "_decompress", _refuse)
    for other in [*(stored[:length] for length in range(len(stored))), stored + b"\0", stored + stored]:
        with pytest.raises(DamagedStoreError) as caught:
            decode(ref, other)
        assert caught.value.reason == "wrong-size"


def _ref_to(stored: bytes, size: int) -> BlobRef:
    return BlobRef(digest_bytes(stored), "zstd", len(stored), Digest("0" * 64), size)


def _unsized_frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(content)


def _lying_frame(content: bytes, claimed: int) -> bytes:
    """A frame whose header says another size than it holds."""
    frame = zstandard.ZstdCompressor().compress(content)
    changed = frame.replace(len(content).to_bytes(4, "little"), claimed.to_bytes(4, "little"), 1)
    assert zstandard.frame_content_size(changed) == claimed
    return changed


BOMB = zstandard.ZstdCompressor().compress(bytes(64 * 2**20))


@pytest.mark.parametrize(
    ("stored", "size"),
    [
        pytest.param(BOMB, 1000, id="a bomb"),
        pytest.param(_lying_frame(bytes(100_000), 70_000), 70_000, id="a frame that holds more than it states"),
        pytest.param(_lying_frame(bytes(100_000), 170_000), 170_000, id="a frame that holds less than it states"),
        pytest.param(_unsized_frame(bytes(5000)), 5000, id="a frame that states no size"),
        pytest.param(_unsized_frame(bytes(5000)), -1, id="a frame that states no size, as promised"),
        pytest.param(b"not a frame at all", 5000, id="no frame"),
        pytest.param(b"", 0, id="nothing"),
        pytest.param(zstandard.ZstdCompressor().compress(b"a" * 5000), 5000, id="another content"),
    ],
)
def test_stored_bytes_that_match_but_are_not_the_content_are_damage(stored: bytes, size: int) -> None:
    with pytest.raises(DamagedStoreError) as caught:
        decode(_ref_to(stored, size), stored)
    assert caught.value.reason == "wrong-content"


def test_a_bomb_is_refused_before_its_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstandard, "ZstdDecompressor", _refuse)
    with pytest.raises(DamagedStoreError, match="another size"):
        decode(_ref_to(BOMB, 1000), BOMB)


@pytest.mark.parametrize("change", [{"size": 4}, {"content_digest": digest_bytes(b"")}], ids=["size", "digest"])
def test_what_is_kept_as_it_is_must_have_the_size_and_digest_of_the_content(change: dict[str, Any]) -> None:
    ref, stored = encode(b"short")
    with pytest.raises(DamagedStoreError) as caught:
        decode(msgspec.structs.replace(ref, **change), stored)
    assert caught.value.reason == "wrong-content"


@pytest.mark.parametrize(
    "change",
    [{"digest": "x"}, {"content_digest": "A" * 64}, {"encoding": "gzip"}, {"size": "5"}, {"more": 1}],
    ids=repr,
)
def test_a_reference_is_validated_when_it_is_read(change: dict[str, object]) -> None:
    fields = {**msgspec.to_builtins(encode(b"x")[0]), **change}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, BlobRef)


class Streaming:
    """A decompressor that can only stream. (To derive one from zstandard's own crashes the interpreter.)"""

    def __init__(self, **options: Any) -> None:
        self.stream_reader = _DECOMPRESSOR(**options).stream_reader

    def decompress(self, stored: bytes) -> bytes:
        raise MemoryError


_DECOMPRESSOR = zstandard.ZstdDecompressor


@pytest.mark.parametrize("claimed", [1 << 40, 1 << 50], ids=["1 TiB", "1 PiB"])
def test_a_forged_size_is_damage_and_is_never_allocated(claimed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes both the frame and what refers to it can make them agree on anything."""
    monkeypatch.setattr(Streaming, "decompress", _refuse)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", Streaming)
    ref, stored = encode(b"x" * 100_000)
    assert ref.encoding == "zstd"
    # The frame's header: magic number, descriptor, and the size in 8 bytes (RFC 8878, 3.1.1.1).
    frame = stored[:4] + bytes([0b1100_0000 | stored[4] & 0b0001_1111]) + stored[5:6] + claimed.to_bytes(8, "little")
    forged = msgspec.structs.replace(ref, digest=digest_bytes(frame), stored_size=len(frame), size=claimed)
    with pytest.raises(DamagedStoreError) as caught:
        decode(forged, frame)
    assert caught.value.reason == "wrong-content"


def test_a_large_content_that_almost_vanishes_comes_back() -> None:
    content = bytes(blobs._TRUSTED_SIZE + 3)
    ref, stored = encode(content)
    assert len(content) > blobs._TRUSTED_RATIO * len(stored)
    assert decode(ref, stored) == content


def test_what_cannot_be_allocated_at_once_is_decompressed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstandard, "ZstdDecompressor", Streaming)
    ref, stored = encode(b"what repeats " * 500_000)
    assert decode(ref, stored) == b"what repeats " * 500_000
    longer = zstandard.ZstdCompressor().compress(bytes(100_000))
    with pytest.raises(DamagedStoreError):
        decode(_ref_to(longer, 70_000), longer)
