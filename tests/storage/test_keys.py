import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln.storage.canonical import canonical_json
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.keys import KeyPart, PartChange, action_key, changed_parts
from graphkiln.storage.plans import compile_parts, parts_of, variant_digest
from tests.storage.samples import QUICK, blob_ref, json_values, network_record, plan_of, target_record, text

GOLDEN = Path(__file__).with_name("golden_keys.json")

DIGEST = digest_bytes(b"x")

parts = st.one_of(
    st.builds(KeyPart.text, text, text),
    st.builds(KeyPart.digest, text, st.binary(max_size=2).map(digest_bytes)),
    st.builds(KeyPart.json, text, json_values(4)),
)
part_lists = st.lists(parts, max_size=5, unique_by=lambda part: part.name)


def _meaning(listed: list[KeyPart]) -> list[tuple[str, str, bytes]]:
    return sorted((part.name, part.type, canonical_json(part.value)) for part in listed)


@QUICK
@given(part_lists, part_lists)
def test_two_lists_have_one_key_only_if_they_say_the_same(first: list[KeyPart], second: list[KeyPart]) -> None:
    assert (action_key(first) == action_key(second)) == (_meaning(first) == _meaning(second))
    assert (changed_parts(first, second) == []) == (_meaning(first) == _meaning(second))


@QUICK
@given(part_lists.flatmap(lambda listed: st.tuples(st.just(listed), st.permutations(listed))))
def test_the_order_of_parts_does_not_matter(both: tuple[list[KeyPart], list[KeyPart]]) -> None:
    assert action_key(both[0]) == action_key(both[1])


# No two of these may share a key.
DISTINCT: dict[str, list[KeyPart]] = {
    "nothing": [],
    "an empty part": [KeyPart.text("", "")],
    "a, bc": [KeyPart.text("a", "bc")],
    "ab, c": [KeyPart.text("ab", "c")],
    "a and bc": [KeyPart.text("a", ""), KeyPart.text("bc", "")],
    "ab and c": [KeyPart.text("ab", ""), KeyPart.text("c", "")],
    "a and b, exchanged": [KeyPart.text("a", "2"), KeyPart.text("b", "1")],
    "a and b": [KeyPart.text("a", "1"), KeyPart.text("b", "2")],
    "text 1": [KeyPart.text("a", "1")],
    "JSON text 1": [KeyPart.json("a", "1")],
    "number 1": [KeyPart.json("a", 1)],
    "number 1.0": [KeyPart.json("a", 1.0)],
    "true": [KeyPart.json("a", value=True)],
    "text true": [KeyPart.text("a", "true")],
    "null": [KeyPart.json("a", None)],
    "zero": [KeyPart.json("a", 0)],
    "negative zero": [KeyPart.json("a", -0.0)],
    "false": [KeyPart.json("a", value=False)],
    "empty list": [KeyPart.json("a", [])],
    "empty object": [KeyPart.json("a", {})],
    "list in list": [KeyPart.json("a", [[]])],
    "nested": [KeyPart.json("a", {"b": {"c": 1}})],
    "nested otherwise": [KeyPart.json("a", {"b": {}, "c": 1})],
    "number 1, nested": [KeyPart.json("a", [{"b": 1}])],
    "true, nested": [KeyPart.json("a", [{"b": True}])],
    "digest": [KeyPart.digest("a", DIGEST)],
    "the digest as text": [KeyPart.text("a", DIGEST)],
    "JSON of another JSON": [KeyPart.json("a", '{"b":{"c":1}}')],
    "composed é": [KeyPart.text("a", "\u00e9")],
    "decomposed é": [KeyPart.text("a", "e\u0301")],
}


def test_what_differs_has_another_key_and_the_difference_is_told() -> None:
    for one, other in combinations(DISTINCT, 2):
        assert action_key(DISTINCT[one]) != action_key(DISTINCT[other]), (one, other)
        assert changed_parts(DISTINCT[one], DISTINCT[other]), (one, other)


def test_the_order_within_an_object_does_not_matter_and_within_a_list_it_does() -> None:
    assert action_key([KeyPart.json("a", {"x": 1, "y": 2})]) == action_key([KeyPart.json("a", {"y": 2, "x": 1})])
    assert action_key([KeyPart.json("a", [1, 2])]) != action_key([KeyPart.json("a", [2, 1])])


@pytest.mark.parametrize("second", [KeyPart.text("a", "1"), KeyPart.json("a", 2)], ids=["equal", "different"])
def test_two_parts_of_one_name_are_refused(second: KeyPart) -> None:
    with pytest.raises(ValueError, match="share a name"):
        action_key([KeyPart.text("a", "1"), second])


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeyPart.digest("a", Digest(DIGEST[:-1])),
        lambda: action_key([KeyPart.json("a", float("nan"))]),
        lambda: action_key([KeyPart.json("a", 2**64)]),
        lambda: action_key([KeyPart.text("\ud800", "")]),
        lambda: action_key([KeyPart.text("a", "\ud800")]),
    ],
    ids=["no digest", "no number", "too large", "no name", "no text"],
)
def test_what_cannot_be_written_exactly_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        make()


def test_changes_are_listed_by_name_with_both_sides() -> None:
    one, two, three = KeyPart.text("b", "1"), KeyPart.text("b", "2"), KeyPart.text("a", "3")
    same = KeyPart.json("same", {"x": 1})
    assert changed_parts([one, same], [two, same, three]) == [PartChange("a", None, three), PartChange("b", one, two)]
    assert changed_parts([one], []) == [PartChange("b", one, None)]


def _golden_parts() -> dict[str, list[KeyPart]]:
    plan = plan_of({"forward": blob_ref(b"payload")})
    return {
        "nothing": [],
        "one text": [KeyPart.text("compiler", "cc 12.2")],
        "each type": [
            KeyPart.text("text", "é"),
            KeyPart.digest("digest", DIGEST),
            KeyPart.json("json", {"list": [1, 1.5, True, None, "1"], "empty": {}}),
        ],
        "a compile": list(parts_of(plan, plan.graphs[0])),
        "a variant": [KeyPart.json("parameters", dict(plan.network.parameters)), *_target_parts()],
    }


def _target_parts() -> list[KeyPart]:
    target = target_record()
    settings = [KeyPart.json(f"target.{name}", value) for name, value in sorted(target.settings.items())]
    return [KeyPart.text("backend", target.backend), *settings]


def test_keys_stay_what_they_were(tmp_path: Path) -> None:
    """A key that changes makes everybody compile everything again: do it on purpose, with a new domain."""
    actual = {name: action_key(listed) for name, listed in _golden_parts().items()}
    expected = json.loads(GOLDEN.read_text())
    if actual != expected:
        written = tmp_path / GOLDEN.name
        written.write_text(json.dumps(actual, indent=2) + "\n")
        changed = sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name))
        pytest.fail(f"the keys of {changed} changed; the actual ones are in {written}, to compare with {GOLDEN.name}")


def test_a_variant_is_a_key_of_parameters_target_and_toolchain() -> None:
    parameters = KeyPart.json("parameters", {"layers": 2, "dropout": 0.5})
    assert variant_digest(network_record(), target_record(), []) == action_key([parameters, *_target_parts()])
    tool = KeyPart.text("backend.version", "1")
    expected = action_key([parameters, *_target_parts(), tool])
    assert variant_digest(network_record(), target_record(), [tool]) == expected


def test_a_compile_depends_on_backend_and_payload_and_not_on_the_frontend_or_on_names() -> None:
    tools = [KeyPart.text("frontend.version", "1"), KeyPart.text("backend.version", "1")]
    another_frontend = [KeyPart.text("frontend.version", "2"), KeyPart.text("backend.version", "1")]
    another_backend = [KeyPart.text("frontend.version", "1"), KeyPart.text("backend.version", "2")]
    key = action_key(compile_parts(target_record(), tools, DIGEST, "text"))
    assert key == action_key(compile_parts(target_record("renamed"), another_frontend, DIGEST, "text"))
    assert key != action_key(compile_parts(target_record(), another_backend, DIGEST, "text"))
    assert key != action_key(compile_parts(target_record(), tools, digest_bytes(b"other"), "text"))
    assert key != action_key(compile_parts(target_record(), tools, DIGEST, "binary"))
