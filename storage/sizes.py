"""Sizes as people write them: ``200GB``, ``1.5TiB``, ``4096``."""

import re

from graphkiln.storage.errors import BadInputError

# Both families of units are in use for storage: the decimal ones of disks, the binary ones of memory.
_BYTES = {"": 1, **{unit: 1000**power for power, unit in enumerate("kmgtp", 1)}}
_BYTES |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgtp", 1)}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?i?)b?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Read a number of bytes such as ``200GB``, ``1.5TiB`` or ``1000``.

    Raises:
        BadInputError: the text is something else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _BYTES:
        raise BadInputError(f"{text!r} is no size: write 200GB, 1.5TiB or a number of bytes", reason="bad-size")
    return int(float(match[1]) * _BYTES[match[2].lower()])
