import enum
import math
import uuid
from typing import Any

import pytest
from hypothesis import given

from graphkiln.storage.canonical import Json, canonical_json, parse_json
from tests.storage.samples import NOW, QUICK, json_values


class Color(enum.Enum):
    RED = "red"


@QUICK
@given(json_values())
def test_what_is_written_is_read_and_written_again_alike(value: Json) -> None:
    data = canonical_json(value)
    assert parse_json(data) == value
    assert canonical_json(parse_json(data)) == data


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"b": 1, "a": [True, None, 1.5]}, b'{"a":[true,null,1.5],"b":1}'),
        ({"é": 1, "z": 2, "𐀀": 3, "\uffff": 4}, '{"z":2,"é":1,"\uffff":4,"𐀀":3}'.encode()),
        ((1, (2, "x")), b'[1,[2,"x"]]'),
        ('"\\\n\x01é', '"\\"\\\\\\n\\u0001é"'.encode()),
        (1.0, b"1.0"),
        (-0.0, b"-0.0"),
        (2**64 - 1, b"18446744073709551615"),
    ],
)
def test_the_encoding_is_this_one(value: Any, data: bytes) -> None:
    assert canonical_json(value) == data


def test_the_order_of_insertion_does_not_matter() -> None:
    names = [str(number) for number in range(100)]
    forwards: Json = {name: dict.fromkeys(names, name) for name in names}
    backwards: Json = {name: dict.fromkeys(reversed(names), name) for name in reversed(names)}
    assert canonical_json(forwards) == canonical_json(backwards)


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "deep inside"])
@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        2**64,
        -(2**63) - 1,
        {1: 2},
        {1, 2},
        b"bytes",
        NOW,
        NOW.date(),
        uuid.UUID(int=0),
        Color.RED,
        Color,
        "\ud800",
    ],
    ids=ascii,
)
def test_what_json_cannot_hold_exactly_is_refused(value: Any, wrapped: bool) -> None:
    nested: Any = {"a": [({"b": value},)]}
    with pytest.raises(ValueError):
        canonical_json(nested if wrapped else value)


def test_a_value_that_is_too_deep_is_refused_and_not_a_crash() -> None:
    deep: Json = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ValueError):
        canonical_json(deep)


@pytest.mark.parametrize("data", [b"", b"{", b"nan", b"{'a': 1}", b"\xff", b'"\\ud800"', b"[1,]", b"1e999", b"1 2"])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(data)
