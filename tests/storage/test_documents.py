from typing import Any

import msgspec
import pytest

from graphkiln.storage.canonical import canonical_json, parse_json
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.documents import SCHEMA, seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError
from tests.storage.samples import documents, flipped, sealed

KINDS = documents()

EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def _resealed(envelope: dict[str, Any]) -> bytes:
    """What somebody would have written whose digest is right."""
    return canonical_json({**envelope, "digest": digest_bytes(canonical_json(envelope))})


def _envelope(kind: str, **changes: Any) -> dict[str, Any]:
    return {"body": msgspec.to_builtins(KINDS[kind]), "kind": kind, "schema": SCHEMA, **changes}


@EACH_KIND
def test_a_document_comes_back_as_it_was(kind: str) -> None:
    body = KINDS[kind]
    data = seal(kind, body)
    assert unseal(data, kind, type(body)) == body
    assert seal(kind, unseal(data, kind, type(body))) == data
    assert _resealed(_envelope(kind)) == data


@EACH_KIND
def test_every_changed_byte_is_damage_and_never_another_error(kind: str) -> None:
    body, data = KINDS[kind], sealed(kind)
    for position in range(len(data)):
        for mask in (0x01, 0x10, 0x5C, 0x80):
            with pytest.raises(DamagedStoreError):
                unseal(flipped(data, position, mask), kind, type(body))


@EACH_KIND
@pytest.mark.parametrize("character", [b"e", b'"', b"\\", b"9", b"{", b"}", b" ", b"\0", b"\xff"], ids=repr)
def test_every_byte_that_becomes_this_one_is_damage(kind: str, character: bytes) -> None:
    body, data = KINDS[kind], sealed(kind)
    for position in range(len(data)):
        changed = data[:position] + character + data[position + 1 :]
        if changed != data:
            with pytest.raises(DamagedStoreError):
                unseal(changed, kind, type(body))


@EACH_KIND
def test_every_truncation_is_damage(kind: str) -> None:
    body, data = KINDS[kind], sealed(kind)
    for length in range(len(data)):
        with pytest.raises(DamagedStoreError):
            unseal(data[:length], kind, type(body))


@EACH_KIND
def test_bytes_that_the_digest_does_not_see_are_damage(kind: str) -> None:
    body, data = KINDS[kind], sealed(kind)
    reordered = dict(reversed(list(_items(data))))
    others = [
        b" " + data,
        data + b"\n",
        data + b"\0",
        data + data,
        b"\xef\xbb\xbf" + data,
        data.replace(b":", b": ", 1),
        data.replace(b'"schema":1', b'"schema":1.0'),
        data.replace(b'"kind"', b'"\\u006bind"'),
        data[:-1] + b',"schema":1}',
        b'{"schema":1,' + data[1:],
        msgspec.json.encode(reordered),
    ]
    for other in others:
        assert other != data
        with pytest.raises(DamagedStoreError):
            unseal(other, kind, type(body))


def _items(data: bytes) -> list[tuple[str, Any]]:
    envelope = parse_json(data)
    assert isinstance(envelope, dict)
    return list(envelope.items())


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"null", b"[]", b"{}", b"1", b'"text"', b'{"digest":null}', b"\xff\xfe"),
        *(b"[" * 5000, b"[" * 900 + b"]" * 900, b'{"a":' * 900 + b"1" + b"}" * 900),
        *(b'{"a":18446744073709551616}', b'{"a":-1e-400}', b'{"a":1e400}'),
    ],
    ids=lambda data: ascii(data[:20]),
)
def test_what_is_no_document_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedStoreError):
        unseal(data, "ref", type(KINDS["ref"]))


@EACH_KIND
def test_a_document_is_never_read_as_one_of_another_kind(kind: str) -> None:
    for other, body in KINDS.items():
        if other != kind:
            with pytest.raises(DamagedStoreError) as caught:
                unseal(sealed(kind), other, type(body))
            assert caught.value.reason == "wrong-kind"


@EACH_KIND
def test_a_document_of_a_newer_schema_asks_for_an_upgrade(kind: str) -> None:
    newer = _resealed({**_envelope(kind, schema=SCHEMA + 1, body={"other": 1}), "more": 1})
    with pytest.raises(BadInputError, match="upgrade") as caught:
        unseal(newer, kind, type(KINDS[kind]))
    assert caught.value.reason == "newer-format"
    with pytest.raises(DamagedStoreError):
        unseal(newer.replace(b'"other":1', b'"other":2'), kind, type(KINDS[kind]))


@pytest.mark.parametrize("schema", [0, -1, True, 1.0, "1", None, [1]], ids=repr)
def test_a_schema_that_never_was_is_damage(schema: Any) -> None:
    with pytest.raises(DamagedStoreError) as caught:
        unseal(_resealed(_envelope("ref", schema=schema)), "ref", type(KINDS["ref"]))
    assert caught.value.reason == "wrong-schema"


def test_fields_that_no_document_has_are_damage() -> None:
    ref = msgspec.to_builtins(KINDS["ref"])
    missing = {name: value for name, value in ref.items() if name != "manifest"}
    envelopes: list[dict[str, Any]] = [
        _envelope("ref", more=1),
        _envelope("ref", body={**ref, "more": 1}),
        _envelope("ref", body=missing),
        _envelope("ref", body={**ref, "manifest": None}),
        _envelope("ref", body={**ref, "manifest": "x"}),
        _envelope("ref", body={**ref, "variant": "../../etc"}),
        _envelope("ref", body={**ref, "committed_at": "yesterday"}),
        _envelope("ref", body={**ref, "committed_at": "2026-01-02T03:04:05"}),
        _envelope("ref", body=[ref]),
        _envelope("ref", body=None),
        {"kind": "ref", "schema": SCHEMA},
        {"body": ref, "kind": "ref"},
    ]
    for envelope in envelopes:
        with pytest.raises(DamagedStoreError) as caught:
            unseal(_resealed(envelope), "ref", type(KINDS["ref"]))
        assert caught.value.reason == "wrong-schema", envelope


@EACH_KIND
def test_fields_within_a_document_are_checked_all_the_way_down(kind: str) -> None:
    body = msgspec.to_builtins(KINDS[kind])
    for changed in _each_with_an_unknown_field(body):
        with pytest.raises(DamagedStoreError):
            unseal(_resealed(_envelope(kind, body=changed)), kind, type(KINDS[kind]))


def _each_with_an_unknown_field(value: Any, free: bool = False) -> list[Any]:
    """Return one changed copy of `value` for each record within it."""
    found: list[Any] = []
    if isinstance(value, dict):
        found += [] if free else [{**value, "unknown_field": 1}]
        for name, item in value.items():
            # These hold what users and adapters call their things, at any name.
            inner_free = name in ("defaults", "parameters", "options", "settings", "artifacts", "outputs", "value")
            inner_free = inner_free or (free and name in ("forward", "backward"))
            found += [{**value, name: changed} for changed in _each_with_an_unknown_field(item, inner_free)]
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            found += [[*value[:index], changed, *value[index + 1 :]] for changed in _each_with_an_unknown_field(item)]
    return found


def test_what_json_cannot_hold_exactly_is_not_sealed() -> None:
    class Body(msgspec.Struct):
        number: float

    with pytest.raises(ValueError):
        seal("body", Body(float("nan")))
