"""BLAKE3 digests, written as 64 lowercase hexadecimal digits.

Source of the algorithm: https://github.com/BLAKE3-team/BLAKE3-specs. The digest is 32 bytes long.
"""

import io
import os
import re
from pathlib import Path
from typing import Annotated, NewType

import msgspec
from blake3 import blake3

ALGORITHM = "blake3"

# A document that says anything else where a digest belongs is refused when it is read.
Digest = NewType("Digest", Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")])

_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")

# Sizes in bytes from which on a second core is worth it: to hash what is in memory, and to hash what is being read.
_HASH_IN_THREADS_FROM = 2**22
HASH_WHILE_READING_FROM = 2**25
_PIECE = 2**20
_THREADS = 4


def digest_bytes(data: bytes | memoryview) -> Digest:
    """Return the digest of `data`."""
    if len(data) < _HASH_IN_THREADS_FROM:
        return Digest(blake3(data).hexdigest())
    # Threads of its own: those that the library shares within a process do not survive a fork, and wait for ever.
    return Digest(blake3(data, max_threads=_threads()).hexdigest())


def read_with_digest(descriptor: int, size: int) -> tuple[bytes, Digest]:
    """Return the bytes of a large file and the digest of these very bytes. Pieces are hashed while the next is read.

    Args:
        descriptor: the file, at its start.
        size: its size, for which memory is taken.

    Raises:
        OSError: it cannot be read.
    """
    from concurrent.futures import ThreadPoolExecutor

    hasher = blake3()
    filled = 0
    # Lends its memory out, and gives it back as bytes without a copy.
    stream = io.BytesIO(bytes(size))
    with (
        open(descriptor, "rb", buffering=0, closefd=False) as file,  # a descriptor has no path
        stream.getbuffer() as buffer,
        ThreadPoolExecutor(1) as pool,
    ):
        pieces = []
        while read := file.readinto(buffer[filled : filled + _PIECE]):
            pieces.append(pool.submit(hasher.update, buffer[filled : filled + read]))
            filled += read
        for piece in pieces:
            piece.result()
        # Somebody may have made it longer; then no digest will match, but these are the bytes.
        rest = file.read()
    stream.truncate(filled)
    hasher.update(rest)
    data = stream.getvalue()
    return data + rest if rest else data, Digest(hasher.hexdigest())


def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), _THREADS)


def digest_file(path: Path) -> Digest:
    """Return the digest of the file's bytes, read through a memory map.

    Raises:
        OSError: the file cannot be read.
    """
    return Digest(blake3().update_mmap(path).hexdigest())


def is_digest(text: str) -> bool:
    """Tell whether `text` is a well-formed digest."""
    return _DIGEST_PATTERN.fullmatch(text) is not None
