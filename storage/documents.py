"""Documents: canonical JSON with a kind, a schema version and a digest of themselves.

One value has one encoding, so a document is either byte for byte what was written, or damaged.
"""

from typing import TypeVar

import msgspec

from graphkiln.storage.canonical import Json, canonical_json, encode_parsed, parse_json
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import BadInputError, DamagedStoreError

SCHEMA = 1

Body = TypeVar("Body", bound=msgspec.Struct)


def seal(kind: str, body: msgspec.Struct) -> bytes:
    """Return the stored bytes of a document.

    Args:
        kind: what it is, such as ``"manifest"``; a document is never read as another kind.
        body: its content.

    Raises:
        ValueError: the body holds something that JSON cannot hold exactly.
    """
    envelope: dict[str, Json] = {"body": msgspec.to_builtins(body), "kind": kind, "schema": SCHEMA}
    return canonical_json({**envelope, "digest": digest_bytes(canonical_json(envelope))})


def unseal(data: bytes, kind: str, body_type: type[Body]) -> Body:
    """Return the content of a document, once its digest has matched.

    Raises:
        DamagedStoreError: these are not the bytes that were written.
        BadInputError: a newer GraphKiln wrote it.
    """
    envelope = _envelope(data)
    schema = envelope.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise BadInputError(
            f"it has schema {schema}, and this GraphKiln reads up to {SCHEMA}: upgrade GraphKiln",
            reason="newer-format",
        )
    if type(schema) is not int or schema != SCHEMA or envelope.keys() != {"body", "kind", "schema"}:
        raise DamagedStoreError("it has not the fields of a document", reason="wrong-schema")
    if envelope.get("kind") != kind:
        raise DamagedStoreError(f"it is a {envelope.get('kind')}, not a {kind}", reason="wrong-kind")
    try:
        return msgspec.convert(envelope.get("body"), body_type)
    except msgspec.ValidationError as error:
        raise DamagedStoreError(f"its content is not that of a {kind}: {error}", reason="wrong-schema") from error


def _envelope(data: bytes) -> dict[str, Json]:
    try:
        envelope = parse_json(data)
    except ValueError as error:
        raise DamagedStoreError(f"it is not JSON: {error}", reason="not-json") from error
    if not isinstance(envelope, dict):
        raise DamagedStoreError("it is not a JSON object", reason="not-json")
    digest = envelope.pop("digest", None)
    try:
        sealed = encode_parsed(envelope)
        encoded = encode_parsed({**envelope, "digest": digest})
    except ValueError as error:
        raise DamagedStoreError(f"no document is written like this: {error}", reason="wrong-encoding") from error
    if digest != digest_bytes(sealed):
        raise DamagedStoreError("its bytes do not match its digest", reason="wrong-digest")
    # Any byte that the digest does not see, such as white space, is damage all the same.
    if encoded != data:
        raise DamagedStoreError("its encoding is not the one that was written", reason="wrong-encoding")
    return envelope
