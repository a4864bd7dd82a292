"""Action keys: a digest over named, typed, framed parts.

Every part is written as three fields (name, type, value), and every field is preceded by its length, so that
no two lists of parts share a preimage: ``("a", "bc")`` and ``("ab", "c")`` differ, and so do the text ``"1"``
and the number ``1``. The parts are stored beside the result, so that a miss can be explained.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from graphkiln.storage.canonical import Json, canonical_json
from graphkiln.storage.digests import Digest, digest_bytes, is_digest

_DOMAIN = b"graphkiln action key 1"
_LENGTH_BYTES = 8


class KeyPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named input of an action.

    Attributes:
        name: what it is, such as ``"jaxlib.version"``; unique within a key.
        type: how `value` is to be read: free text, the digest of something larger, or any JSON value.
        value: the input itself.
    """

    name: str
    type: Literal["text", "digest", "json"]
    value: Json

    @staticmethod
    def text(name: str, value: str) -> "KeyPart":
        """Make a part out of a text."""
        return KeyPart(name, "text", value)

    @staticmethod
    def digest(name: str, value: Digest) -> "KeyPart":
        """Make a part out of a digest.

        Raises:
            ValueError: `value` is not a digest.
        """
        if not is_digest(value):
            raise ValueError(f"key part {name}: {value!r} is not a digest")
        return KeyPart(name, "digest", value)

    @staticmethod
    def json(name: str, value: Json) -> "KeyPart":
        """Make a part out of any JSON value."""
        return KeyPart(name, "json", value)


def action_key(parts: Sequence[KeyPart]) -> Digest:
    """Return the digest of `parts`. Their order does not matter: they are framed in the order of their names.

    Raises:
        ValueError: two parts have the same name, or a value cannot be written as JSON.
    """
    names = [part.name for part in parts]
    if len(set(names)) != len(names):
        raise ValueError(f"key parts share a name: {sorted(names)}")
    frames = [_DOMAIN]
    for part in sorted(parts, key=lambda part: part.name):
        frames += _frame(part)
    return digest_bytes(_framed(frames))


class PartChange(msgspec.Struct, frozen=True):
    """A key part that two keys do not share. `before` or `after` is None where only one of them has it."""

    name: str
    before: KeyPart | None
    after: KeyPart | None


def changed_parts(before: Iterable[KeyPart], after: Iterable[KeyPart]) -> list[PartChange]:
    """Return what differs between two lists of parts, in the order of the names."""
    old = {part.name: part for part in before}
    new = {part.name: part for part in after}
    return [
        PartChange(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if _frame(old.get(name)) != _frame(new.get(name))
    ]


def _frame(part: KeyPart | None) -> list[bytes]:
    # Python holds 1, 1.0 and True for equal, so that parts are compared by what the key is made of.
    return [] if part is None else [part.name.encode(), part.type.encode(), canonical_json(part.value)]


def _framed(fields: Iterable[bytes]) -> bytes:
    return b"".join(len(field).to_bytes(_LENGTH_BYTES, "big") + field for field in fields)
