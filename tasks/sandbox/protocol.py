"""The messages between the pool and a child, and how they travel over a socket.

A frame is a prefix (magic, length of the header), a header (MessagePack: the message and the sizes of its blobs)
and the blobs as they are. Payloads and outputs thus pass without being encoded or joined. There is no pickle: a
child runs other people's code, and unpickling its answer would let that code run in the parent.
"""

import io
import socket
import struct
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from graphkiln.storage.ranks import RankSet
from graphkiln.tasks.sandbox.outcome import FailureReason

_MAGIC = b"GKf1"
_PREFIX = struct.Struct(">4sI")
_MAX_HEADER_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024


class ProtocolError(Exception):
    """What came over the socket is no frame, or not the one that was due."""


class ParseOrder(msgspec.Struct, frozen=True, tag="parse"):
    """Parse a network. The fields are those of `ParseRequest`; `log` is the path of the job's log."""

    adapter: str
    log: str
    network: str
    folder: str
    entrypoint: str
    parameters: dict[str, Any]
    platform: str


class CompileOrder(msgspec.Struct, frozen=True, tag="compile"):
    """Compile a kernel graph, whose payload is the frame's one blob. `folder` is to be made for the backend."""

    adapter: str
    log: str
    graph: str
    payload_format: str
    settings: dict[str, Any]
    folder: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The child has read the job whole. Before this, nothing of the job has happened."""


class GraphHeader(msgspec.Struct, frozen=True, array_like=True):
    """A kernel graph without its payload."""

    name: str
    payload_format: str
    ranks: RankSet


class Parsed(msgspec.Struct, frozen=True, tag="parsed"):
    """The kernel graphs of a network; the blobs are their payloads, in the same order."""

    graphs: list[GraphHeader]


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """The names of an artifact's outputs; the blobs are the outputs, in the same order."""

    names: list[str]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The adapter raised. `reason` is the one of the `BadInputError` if that is the kind."""

    kind: Literal["bad-input"] | FailureReason
    message: str
    reason: str = ""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What became of a job.

    Attributes:
        result: what the adapter returned or raised.
        peak_memory_bytes: most memory that the child itself, without descendants, had resident during the job.
        clean: whether no descendant of the child is left.
    """

    result: Parsed | Compiled | Failed
    peak_memory_bytes: int
    clean: bool


Order: TypeAlias = ParseOrder | CompileOrder
Message: TypeAlias = ParseOrder | CompileOrder | Started | Answer


class _Header(msgspec.Struct, frozen=True, array_like=True):
    message: Message
    sizes: list[int]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)


def send(channel: socket.socket, message: Message, blobs: Sequence[bytes] = ()) -> None:
    """Write one frame.

    Raises:
        OSError: the other side has gone.
    """
    header = _ENCODER.encode(_Header(message, [len(blob) for blob in blobs]))
    for part in (_PREFIX.pack(_MAGIC, len(header)) + header, *blobs):
        # The flag spares a program that gave SIGPIPE its default action from being ended by a dead child.
        channel.sendall(part, socket.MSG_NOSIGNAL)


def receive(channel: socket.socket, max_blob_bytes: int) -> tuple[Message, list[bytes]]:
    """Read one frame: the message and its blobs, which together have at most `max_blob_bytes`.

    Raises:
        EOFError: the other side has gone before the end of the frame.
        ProtocolError: what came is no frame, or has too many bytes.
    """
    magic, header_bytes = _PREFIX.unpack(_read(channel, _PREFIX.size))
    if magic != _MAGIC or header_bytes > _MAX_HEADER_BYTES:
        raise ProtocolError(f"not a frame: it starts with {magic!r}")
    try:
        header = _DECODER.decode(_read(channel, header_bytes))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a frame's header: {error}") from error
    if any(size < 0 for size in header.sizes) or sum(header.sizes) > max_blob_bytes:
        raise ProtocolError(f"blobs of {sum(header.sizes)} bytes, but at most {max_blob_bytes} may come")
    return header.message, [_read(channel, size) for size in header.sizes]


def _read(channel: socket.socket, size: int) -> bytes:
    # Memory grows with what really comes, whatever size was announced; getvalue() makes no copy.
    buffer = io.BytesIO()
    while missing := size - buffer.tell():
        try:
            chunk = channel.recv(min(missing, _CHUNK_BYTES))
        except ConnectionError as error:
            raise EOFError("the other side has gone") from error
        if not chunk:
            raise EOFError("the other side has gone")
        buffer.write(chunk)
    return buffer.getvalue()
