"""Sizes as people write them: ``50GB``, ``1.5 TiB``, ``4096``."""

import re

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for ending, base in (("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Return a number of bytes; kB, MB, GB and TB are powers of 1000, KiB to TiB powers of 1024.

    Raises:
        ValueError: it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 50GB or 20GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
