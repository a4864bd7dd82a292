"""An artifact is one blob, however many outputs a backend makes: one request fetches it, and one digest checks it.

A single output is stored as it is. Several are put one after another, behind the length of a list of their names and
sizes, and that list.
"""

from collections.abc import Mapping

import msgspec

from graphkiln.storage.canonical import canonical_json, parse_json
from graphkiln.storage.errors import DamagedStoreError

# The name under which several outputs are stored as one.
ALL_OUTPUTS = "all-outputs"

_LENGTH_BYTES = 8


def pack(outputs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the outputs of a backend as what is stored of them, by name."""
    if len(outputs) == 1 and ALL_OUTPUTS not in outputs:
        return dict(outputs)
    return {ALL_OUTPUTS: b"".join([_list_of(outputs), *outputs.values()])}


def unpack(stored: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the outputs that `pack` was given.

    Raises:
        DamagedStoreError: `pack` has never returned this.
    """
    if stored.keys() != {ALL_OUTPUTS}:
        return dict(stored)
    packed = stored[ALL_OUTPUTS]
    start = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "big")
    try:
        contents = msgspec.convert(parse_json(packed[_LENGTH_BYTES:start]), list[tuple[str, int]])
    except (ValueError, msgspec.ValidationError) as error:
        raise _not_packed(f"its list of outputs cannot be read: {error}") from error
    outputs = {}
    for name, size in contents:
        outputs[name] = packed[start : start + size] if size >= 0 else b""
        start += size
    if start != len(packed) or _list_of(outputs) != packed[: len(packed) - sum(map(len, outputs.values()))]:
        raise _not_packed("its outputs are not those of its list")
    return outputs


def _list_of(outputs: Mapping[str, bytes]) -> bytes:
    contents = canonical_json([[name, len(data)] for name, data in outputs.items()])
    return len(contents).to_bytes(_LENGTH_BYTES, "big") + contents


def _not_packed(what: str) -> DamagedStoreError:
    return DamagedStoreError(f"an artifact is damaged: {what}", reason="wrong-content")
