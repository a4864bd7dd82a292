"""Durations and sizes as users write them."""

import math
import re
from datetime import timedelta

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.retention import Policy

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_LONGEST = timedelta(days=36_500)
# Both families of units are in use for storage: the decimal ones of disks, the binary ones of memory.
_BYTES = {"": 1, **{unit: 1000**power for power, unit in enumerate("kmgtp", 1)}}
_BYTES |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgtp", 1)}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?i?)b?", re.IGNORECASE | re.ASCII)


def parse_duration(text: str) -> timedelta:
    """Read a duration such as ``30d``, ``12h`` or ``90m``.

    Raises:
        BadInputError: the text is something else, or more than a century.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else math.inf
    if seconds > _LONGEST.total_seconds():
        raise BadInputError(
            f"{text!r} is no duration of at most a century: write 30d, 12h, 90m, 2w or 45s", reason="bad-duration"
        )
    return timedelta(seconds=seconds)


def parse_size(text: str) -> int:
    """Read a number of bytes such as ``200GB``, ``1.5TiB`` or ``1000``.

    Raises:
        BadInputError: the text is something else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _BYTES:
        raise BadInputError(f"{text!r} is no size: write 200GB, 1.5TiB or a number of bytes", reason="bad-size")
    return int(float(match[1]) * _BYTES[match[2].lower()])


def retention_policy(
    *, keep_last: int | None = None, older_than: str | None = None, max_size: str | None = None, grace: str = "1d"
) -> Policy:
    """Return the policy of a collection as users write it.

    Raises:
        BadInputError: a duration or a size is none.
    """
    return Policy(
        keep_last=keep_last,
        older_than=None if older_than is None else parse_duration(older_than),
        max_bytes=None if max_size is None else parse_size(max_size),
        grace=parse_duration(grace),
    )
