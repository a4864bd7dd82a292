"""BLAKE3 digests, written as 64 lowercase hexadecimal digits.

Source of the algorithm: https://github.com/BLAKE3-team/BLAKE3-specs. The digest is 32 bytes long.
"""

import re
from pathlib import Path
from typing import Annotated, NewType

import msgspec
from blake3 import blake3

ALGORITHM = "blake3"

# A document that says anything else where a digest belongs is refused when it is read.
Digest = NewType("Digest", Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")])

_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")


def digest_bytes(data: bytes | memoryview) -> Digest:
    """Return the digest of `data`."""
    return Digest(blake3(data).hexdigest())


def digest_file(path: Path) -> Digest:
    """Return the digest of the file's bytes, read through a memory map.

    Raises:
        OSError: the file cannot be read.
    """
    return Digest(blake3().update_mmap(path).hexdigest())


def is_digest(text: str) -> bool:
    """Tell whether `text` is a well-formed digest."""
    return _DIGEST_PATTERN.fullmatch(text) is not None
