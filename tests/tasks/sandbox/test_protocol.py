import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from graphkiln.storage.ranks import RankSet
from graphkiln.tasks.sandbox.protocol import (
    Answer,
    Compiled,
    CompileOrder,
    Failed,
    GraphHeader,
    Message,
    Parsed,
    ParseOrder,
    ProtocolError,
    Started,
    receive,
    send,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.mark.parametrize(
    ("message", "blobs"),
    [
        (ParseOrder("jax", "/log", "net", "/folder", "a.py:b", {"x": [1, {"y": None}], "z": 0.5}, "cpu"), []),
        (CompileOrder("xla", "/log", "stage-0", "jax-export/1", {"level": 3}, "/work"), [b"payload"]),
        (Started(), []),
        (Answer(Parsed([GraphHeader("a", "f/1", RankSet.parse("0-3,8"))]), 5, clean=True), [b""]),
        (Answer(Compiled(["code", "data"]), 2**40, clean=False), [b"\x00" * 3_000_000, b"x"]),
        (Answer(Failed("bad-input", "no such op: \N{SNOWMAN}", "bad-op"), 0, clean=True), []),
    ],
)
def test_a_frame_arrives_as_it_was_sent(pair: Pair, message: Message, blobs: Sequence[bytes]) -> None:
    writer = threading.Thread(target=send, args=(pair[0], message, blobs))
    writer.start()
    assert receive(pair[1], 2**30) == (message, list(blobs))
    writer.join()


def test_frames_follow_each_other(pair: Pair) -> None:
    for number in range(3):
        send(pair[0], Answer(Compiled(["code"]), number, clean=True), [b"x" * number])
    for number in range(3):
        message, blobs = receive(pair[1], 10)
        assert (message, blobs) == (Answer(Compiled(["code"]), number, clean=True), [b"x" * number])


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"GKf1\xff\xff\xff\xff",
        b"GKf1\x00\x00\x00\x03abc",
        b"GKf1\x00\x00\x00\x04\x92\x81\xa0\xc0",
    ],
)
def test_what_is_no_frame_is_refused(pair: Pair, sent: bytes) -> None:
    pair[0].sendall(sent)
    with pytest.raises(ProtocolError):
        receive(pair[1], 10)


def test_too_many_bytes_are_refused_before_they_are_read(pair: Pair) -> None:
    send(pair[0], Answer(Compiled(["a", "b"]), 0, clean=True), [b"123456", b"12345"])
    with pytest.raises(ProtocolError, match="11 bytes, but at most 10"):
        receive(pair[1], 10)


@pytest.mark.parametrize("sent", [b"", b"GKf1", b"GKf1\x00\x00\x00\x10abc"])
def test_an_end_within_a_frame_is_an_end(pair: Pair, sent: bytes) -> None:
    pair[0].sendall(sent)
    pair[0].close()
    with pytest.raises(EOFError):
        receive(pair[1], 10)
