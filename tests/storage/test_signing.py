"""With trusted keys, nothing counts that none of them has signed as it is."""

import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln.storage import layout
from graphkiln.storage.canonical import Json, canonical_json, parse_json
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.documents import SCHEMA, seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, UntrustedError
from graphkiln.storage.keys import KeyPart
from graphkiln.storage.records import ActionResult, CompileStats, RefRecord, Signature, Signed, Superseded
from graphkiln.storage.results import usable_result
from graphkiln.storage.signing import EVERYBODY, Trust
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import DictFilesystem, FaultyFilesystem
from tests.storage.samples import (
    NOW,
    OUTPUTS,
    QUICK,
    blob_ref,
    compile_toy,
    documents,
    json_values,
    load_toy,
    ref_of,
)
from tests.storage.signers import private_key, public, trusting

KINDS: dict[str, type[Signed]] = {"ref": RefRecord, "action result": ActionResult}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
HOST = trusting("ci", signing="ci")
READER = trusting("ci")


def signed(kind: str, trust: Trust = HOST) -> Any:
    record = documents()[kind]
    assert isinstance(record, Signed)
    return trust.sign(kind, record)


def reason(act: Callable[[], object]) -> str:
    with pytest.raises(UntrustedError) as caught:
        act()
    return caught.value.reason


def check(kind: str, record: Signed, trust: Trust = READER) -> None:
    trust.check(kind, seal(kind, record), record)


# ---------------------------------------------------------------------- what is signed


def test_golden_signatures() -> None:
    """What is signed, byte for byte, and what comes of it."""
    ref = RefRecord("toy", "host", digest_bytes(b"variant"), digest_bytes(b"manifest"), NOW)
    said = (
        b"graphkiln signed document 1\0"
        b'{"body":{"committed_at":"2026-01-02T03:04:05Z",'
        b'"manifest":"' + digest_bytes(b"manifest").encode() + b'","network":"toy","superseded":[],'
        b'"target":"host","variant":"' + digest_bytes(b"variant").encode() + b'"},"kind":"ref","schema":1}'
    )
    made = HOST.sign("ref", ref).signature
    assert made is not None
    assert made.key == "SHA256:u+j7WJe8m4sOSvP+ravJUwSOk3a4v3GYvrr4MMhyP9o"
    assert made.value == private_key("ci").sign(said).hex()
    assert made.value == (
        "9dabadc04dea7159cdbfb5096e0410c9aa0b47e88ef713566a9c5ab8aac1be33"
        "1001778f94f1818907b02d52502e1e5784e07c64fd5882cf9df38b2024347707"
    )

    part = KeyPart.text("stage", "compile")
    stats = CompileStats(1.5, 1000, "host-a", NOW)
    result = ActionResult(digest_bytes(b"key"), (part,), {"kernel.so": blob_ref(b"x")}, None, stats)
    blob = digest_bytes(b"x").encode()
    said = (
        b"graphkiln signed document 1\0"
        b'{"body":{"key":"' + digest_bytes(b"key").encode() + b'","log":null,"outputs":{"kernel.so":{'
        b'"content_digest":"' + blob + b'","digest":"' + blob + b'","encoding":"identity","size":1,"stored_size":1}},'
        b'"parts":[{"name":"stage","type":"text","value":"compile"}],'
        b'"stats":{"finished_at":"2026-01-02T03:04:05Z","host":"host-a","peak_memory_bytes":1000,"seconds":1.5}},'
        b'"kind":"action result","schema":1}'
    )
    made = HOST.sign("action result", result).signature
    assert made is not None
    assert made.value == private_key("ci").sign(said).hex()
    assert made.value == (
        "c20f6594402c536a35a9982467739d0cdb69ec44f13102b4f59bd566da3c37fa"
        "bb75541da4ade1819921bb68008fcc66d73386cba6b6fef4bb40666114e6a007"
    )


STORED_REF = (
    b'{"body":{"committed_at":"2026-01-02T03:04:05Z","manifest":"0d197521d9a48760576da1c87dfd828a60d397ea1'
    b'e16f92a5b7c44b4f4060ce1","network":"toy","signature":{"key":"SHA256:u+j7WJe8m4sOSvP+ravJUwSOk3a4v3GY'
    b'vrr4MMhyP9o","value":"3fde0f4436f01c1dd80d89627f6dd68334d8771dec72df3d515c3dd57ae0d7064c1271b080bcb9'
    b'7bc95c4e203d62df4f76d0b2c051b6d3e5e5015bcae48a6506"},"target":"host","variant":"a26c6ac6edade69968e8'
    b'd8a5fdd2fce8d4805c15a0fe1788bf1fdfe7097e31a4"},"digest":"a8b2ecf0a34f25d8d56d447b7db9a720093f3bdb6b4'
    b'5cb59b583784b5722e442","kind":"ref","schema":1}'
)


def test_a_stored_document_stays_trusted() -> None:
    """These bytes lie in somebody's store, whatever fields a later version adds."""
    ref = unseal(STORED_REF, "ref", RefRecord)
    assert (ref.network, ref.committed_at) == ("toy", NOW)
    READER.check("ref", STORED_REF, ref)


@EACH_KIND
def test_a_signature_is_stored_with_its_document(kind: str) -> None:
    record = signed(kind)
    data = seal(kind, record)
    assert unseal(data, kind, KINDS[kind]) == record
    assert record == signed(kind), "signing twice gives the same bytes"
    check(kind, record)
    assert msgspec.structs.replace(record, signature=None) == documents()[kind]


@EACH_KIND
def test_only_trusted_keys_count(kind: str) -> None:
    record = signed(kind)
    for trust in (trusting("ci"), trusting("other", "ci"), trusting("other", signing="ci"), EVERYBODY):
        check(kind, record, trust)
    assert reason(lambda: check(kind, record, trusting("other"))) == "unknown-key"
    assert reason(lambda: check(kind, record, trusting("other", signing="another"))) == "unknown-key"
    unsigned = msgspec.structs.replace(record, signature=None)
    assert reason(lambda: check(kind, unsigned)) == "unsigned"
    check(kind, unsigned, EVERYBODY)


@EACH_KIND
def test_a_key_cannot_sign_for_another(kind: str) -> None:
    theirs = signed(kind, trusting("mallory", signing="mallory"))
    forged = msgspec.structs.replace(theirs, signature=Signature(public("ci").id, theirs.signature.value))
    assert reason(lambda: check(kind, forged)) == "altered"
    assert reason(lambda: check(kind, forged, trusting("ci", "mallory"))) == "altered"


def test_without_keys_nothing_is_signed() -> None:
    ref = signed("ref")
    assert EVERYBODY.sign("ref", ref).signature is None, "whoever changes a document does not keep its signature"
    with pytest.raises(BadInputError) as caught:
        READER.sign("ref", ref)
    assert caught.value.reason == "no-signing-key"


def leaves(value: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place of a value, whole objects and lists included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from leaves(item, (*path, name))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], change)
    return copy


def resealed(kind: str, body: Json, schema: Json = SCHEMA) -> bytes:
    """What somebody writes who has no key, but knows how a document is made."""
    envelope: dict[str, Json] = {"body": body, "kind": kind, "schema": schema}
    return canonical_json({**envelope, "digest": digest_bytes(canonical_json(envelope))})


def refused(kind: str, data: bytes) -> str:
    """Return why a document is refused; whatever is not the signer's word must be."""
    try:
        record = unseal(data, kind, KINDS[kind])
        READER.check(kind, data, record)
    except (DamagedStoreError, UntrustedError) as error:
        return error.reason
    raise AssertionError(f"accepted: {data!r}")


@EACH_KIND
@given(data=st.data())
@QUICK
def test_any_change_of_any_field_breaks_the_signature(kind: str, data: st.DataObject) -> None:
    body = parse_json(seal(kind, signed(kind)))["body"]  # type: ignore[call-overload,index]
    assert resealed(kind, body) == seal(kind, signed(kind))
    place = data.draw(st.sampled_from(list(leaves(body))))
    change = data.draw(
        st.one_of(
            json_values(4).map(lambda new: lambda _: new),
            st.just(lambda old: [old]),
            st.integers(1, 3).map(lambda by: lambda old: old + by if isinstance(old, int | float) else f"{old}{by}"),
            st.just(lambda old: old[::-1] if isinstance(old, str | list) else None),
        )
    )
    other = changed(body, place, change)
    if canonical_json(other) != canonical_json(body):
        assert refused(kind, resealed(kind, other))


@EACH_KIND
def test_each_field_is_signed(kind: str) -> None:
    """As above, with a change of each field that is not noticed by anything but the signature."""
    record = signed(kind)
    plan = documents()["manifest"].plan  # type: ignore[attr-defined]
    others: Mapping[str, Any] = {
        "ref": {
            "network": "another",
            "target": "another",
            "variant": digest_bytes(b"another"),
            "manifest": digest_bytes(b"another"),
            "committed_at": NOW + timedelta(microseconds=1),
            "superseded": (Superseded(digest_bytes(b"another"), NOW),),
        },
        "action result": {
            "key": digest_bytes(b"another"),
            "parts": plan.toolchain,
            "outputs": {"executable": blob_ref(b"planted")},
            "log": None,
            "stats": CompileStats(0.0, 0, "host-b", NOW),
        },
    }[kind]
    assert {*others, "signature"} == set(record.__struct_fields__)
    for field, value in others.items():
        forged = msgspec.structs.replace(record, **{field: value})
        assert refused(kind, seal(kind, forged)) == "altered", field
    for name, place in (("outputs", ("outputs",)), ("parts", ("parts",))) if kind == "action result" else ():
        body = parse_json(seal(kind, record))["body"]  # type: ignore[call-overload,index]
        emptied = changed(body, place, lambda old: type(old)())
        assert refused(kind, resealed(kind, emptied)) == "altered", name


def test_a_signature_of_one_kind_is_none_of_another() -> None:
    ref = signed("ref")
    said = HOST.sign("plan", documents()["ref"])  # type: ignore[type-var]
    assert said.signature != ref.signature  # type: ignore[attr-defined]
    assert refused("ref", seal("ref", said)) == "altered"


@EACH_KIND
def test_a_signature_does_not_fit_another_document(kind: str) -> None:
    first = signed(kind)
    field = "manifest" if kind == "ref" else "key"
    second = HOST.sign(kind, msgspec.structs.replace(first, **{field: digest_bytes(b"another")}))
    check(kind, second)
    swapped = msgspec.structs.replace(first, signature=second.signature)
    assert refused(kind, seal(kind, swapped)) == "altered"


def test_a_field_that_a_later_version_adds_breaks_no_signature() -> None:
    """What is stored is checked, not what this version would write: older documents lack the fields of newer ones."""

    class Later(RefRecord, frozen=True, kw_only=True):
        note: str = ""

    stored = seal("ref", signed("ref"))
    later = unseal(stored, "ref", Later)
    assert later.note == ""
    READER.check("ref", stored, later)


# ---------------------------------------------------------------------- the store


@pytest.fixture
def files() -> DictFilesystem:
    return DictFilesystem({})


def on(files: DictFilesystem, trust: Trust) -> Store:
    return Store(files, now=lambda: NOW, trust=trust)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING, logger="graphkiln"):
        yield take


def test_what_one_host_signs_another_reads(files: DictFilesystem, warnings: Callable[[], list[str]]) -> None:
    complete = compile_toy(on(files, HOST))
    for trust in (HOST, READER, EVERYBODY, trusting("other", "ci")):
        store = on(files, trust)
        assert load_toy(store, complete.variant) == OUTPUTS
        assert not verify_store(store).problems
    manifest = files.read(complete.paths["manifest"])
    unsigned = DictFilesystem({})
    compile_toy(on(unsigned, EVERYBODY))
    assert unsigned.read(complete.paths["manifest"]) == manifest, "a manifest holds no signature"
    assert not warnings()


@pytest.mark.parametrize("author", [EVERYBODY, trusting("mallory", signing="mallory")], ids=["nobody", "mallory"])
def test_what_is_not_trusted_counts_as_absent_and_is_replaced(
    author: Trust, files: DictFilesystem, warnings: Callable[[], list[str]]
) -> None:
    complete = compile_toy(on(files, author))
    key = complete.plan.graphs[0].key
    why = "unknown-key" if author.required else "unsigned"
    before = dict(files.objects)
    reader = on(files, READER)
    assert reason(lambda: reader.read_ref(*complete.variant)) == why
    assert reason(lambda: reader.read_action(key)) == why
    found = verify_store(reader)
    assert (found.damaged, found.untrusted) == (False, True)
    untrusted = {complete.paths[what] for what in ("ref", "forward action", "backward action")}
    assert {problem.path for problem in found.problems if problem.severity == "untrusted"} == untrusted
    assert not warnings()
    for _ in range(3):
        assert usable_result(reader, key) is None
    (warning,) = warnings()
    assert complete.paths["forward action"] in warning
    assert files.objects == before, "it stays, as others may trust it"

    compile_toy(on(files, HOST))
    assert load_toy(reader, complete.variant) == OUTPUTS
    assert not verify_store(reader).problems
    assert {path for path in before if files.read(path) != before[path]} == untrusted
    assert not [path for path in files.objects if path.startswith(layout.QUARANTINE)]


def test_the_first_of_two_trusted_results_stays(files: DictFilesystem) -> None:
    first, second = on(files, trusting("b", signing="a")), on(files, trusting("a", signing="b"))
    unsigned: ActionResult = msgspec.structs.replace(result_in(files), signature=None)
    theirs = first.trust.sign("action result", unsigned)
    ours = second.trust.sign("action result", msgspec.structs.replace(unsigned, log=None))
    assert first.write_action(theirs) == theirs
    assert second.write_action(ours) == theirs


def result_in(files: DictFilesystem) -> ActionResult:
    """The result of an action of a toy network, which is not in the store (any more)."""
    complete = compile_toy(on(files, EVERYBODY))
    store = on(files, EVERYBODY)
    found = store.read_action(complete.plan.graphs[0].key)
    assert found is not None
    store.drop_action(found)
    return found


class Meanwhile(DictFilesystem):
    """Somebody else does something just before the first replacement."""

    def __init__(self, objects: Mapping[str, bytes], act: Callable[[DictFilesystem], None]) -> None:
        super().__init__(objects)
        self.act: Callable[[DictFilesystem], None] | None = act

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        if self.act is not None and expected is not None:
            act, self.act = self.act, None
            act(self)
        return super().replace(path, data, expected=expected)


def test_an_honest_result_that_came_first_is_not_replaced(files: DictFilesystem) -> None:
    planted = result_in(files)
    on(files, EVERYBODY).write_action(planted)
    theirs = trusting("b", signing="b").sign("action result", planted)
    ours = HOST.sign("action result", planted)
    racing = Meanwhile(files.objects, lambda inner: on(inner, EVERYBODY).replace_action(theirs))
    assert on(racing, trusting("b", signing="ci")).write_action(ours) == theirs
    assert on(racing, trusting("b")).read_action(planted.key) == theirs


def test_a_damaged_result_is_replaced_as_well(files: DictFilesystem) -> None:
    result = HOST.sign("action result", result_in(files))
    path = layout.by_digest(layout.ACTIONS, result.key)
    files.create(path, b"{}")
    assert on(files, HOST).write_action(result) == result
    assert on(files, READER).read_action(result.key) == result


def test_nothing_untrusted_is_written_where_signatures_are_required(files: DictFilesystem) -> None:
    """Whoever copies documents into a store cannot pass a stranger's off as its user's."""
    result = result_in(files)
    ref = ref_of(compile_toy(on(DictFilesystem({}), EVERYBODY)).plan, digest_bytes(b"a manifest"))
    mallory = trusting("mallory", signing="mallory")
    before = dict(files.objects)
    for trust in (HOST, READER):
        store = on(files, trust)
        for sign in (EVERYBODY.sign, mallory.sign):
            planted, moved = sign("action result", result), sign("ref", ref)
            why = "unsigned" if planted.signature is None else "unknown-key"
            assert reason(lambda: store.write_action(planted)) == why  # noqa: B023
            assert reason(lambda: store.replace_action(planted)) == why  # noqa: B023
            assert reason(lambda: store.write_ref(moved)) == why  # noqa: B023
    assert files.objects == before
    store = on(files, READER)
    store.write_action(HOST.sign("action result", result))
    assert store.write_ref(HOST.sign("ref", ref))
    assert store.read_ref(*ref.variant_name) == HOST.sign("ref", ref)


def test_a_document_of_another_place_is_refused_though_it_is_signed(files: DictFilesystem) -> None:
    complete = compile_toy(on(files, HOST))
    network, target, variant = complete.variant
    store = on(files, READER)
    elsewhere = layout.by_variant(layout.REFS, "another", target, variant)
    files.create(elsewhere, files.read(complete.paths["ref"]))
    other = layout.by_digest(layout.ACTIONS, complete.failed_key)
    files.create(other, files.read(complete.paths["forward action"]))
    for read in (lambda: store.read_ref("another", target, variant), lambda: store.read_action(complete.failed_key)):
        with pytest.raises(DamagedStoreError, match="it belongs to"):
            read()
    # Nor does it help to write into it what it should say.
    ref = store.read_ref(network, target, variant)
    assert ref is not None
    files.objects[elsewhere] = seal("ref", msgspec.structs.replace(ref, network="another"))
    assert reason(lambda: store.read_ref("another", target, variant)) == "altered"


# ---------------------------------------------------------------------- logs that are lost


def test_a_result_whose_log_is_lost_is_signed_again(files: DictFilesystem) -> None:
    complete = compile_toy(on(files, HOST))
    key, path = complete.plan.graphs[0].key, complete.paths["forward action"]
    files.delete(complete.paths["log"])
    stored = files.read(path)
    for trust in (READER, EVERYBODY):  # who cannot sign leaves the signed one
        found = usable_result(on(files, trust), key)
        assert found is not None
        assert found.log is None
        assert files.read(path) == stored
    found = usable_result(on(files, HOST), key)
    assert found == on(files, READER).read_action(key)
    assert found is not None
    assert (found.log, found.signature is None) == (None, False)
    assert files.read(path) != stored


# ---------------------------------------------------------------------- requests


def test_signatures_cost_no_request() -> None:
    counts = []
    for trust in (EVERYBODY, HOST):
        watched = FaultyFilesystem(DictFilesystem({}))
        store = Store(watched, now=lambda: NOW, trust=trust)
        complete = compile_toy(store)
        compile_toy(store)
        load_toy(store, complete.variant)
        counts.append([operation for operation, _ in watched.point.operations])
    assert counts[0] == counts[1]
