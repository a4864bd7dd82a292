"""Canonical JSON: one byte string for one value, on every host and in every process.

Object keys are sorted by code point, nothing is indented, text is UTF-8, and floating-point numbers are
written in their shortest form. Not-a-number and infinities are refused, because JSON has no word for them.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
else:
    # msgspec resolves annotations and knows no recursive alias; what it decodes from JSON is JSON anyway.
    Json = Any


def canonical_json(value: Json) -> bytes:
    """Return the one encoding of `value`.

    Raises:
        ValueError: `value` holds something that JSON cannot hold exactly: a non-finite number, an integer of
            more than 64 bits, a key that is not text, a date.
    """
    if not isinstance(value, str):  # most are, and need no look
        _refuse_inexact(value)
    return encode_parsed(value)


def encode_parsed(value: Json) -> bytes:
    """Return the one encoding of a value that `parse_json` gave.

    Where the text that was parsed cannot be held exactly, the encoding differs from that text: who compares the two
    need not look at every value.

    Raises:
        ValueError: it is nested too deeply.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise ValueError(f"cannot be written as JSON: {error}") from error


def parse_json(data: bytes) -> Json:
    """Return the value that `data` encodes.

    Raises:
        ValueError: `data` is not JSON.
    """
    value: Json = orjson.loads(data)
    return value


def _refuse_inexact(value: Json) -> None:
    # orjson writes nan and infinity as null, and dates, UUIDs and dataclasses as if they were something else,
    # which would give two values one encoding. No recursion: how deep a value goes is for orjson to limit.
    waiting: list[Sequence[Json]] = [(value,)]
    while waiting:
        for item in waiting.pop():
            if isinstance(item, float):
                if not math.isfinite(item):
                    raise ValueError(f"{item} cannot be written as JSON")
            elif isinstance(item, dict):
                waiting.append(list(item.values()))
            elif isinstance(item, list | tuple):
                waiting.append(item)
            elif item is not None and not isinstance(item, bool | int | str):
                raise ValueError(f"a {type(item).__name__} cannot be written as JSON")
