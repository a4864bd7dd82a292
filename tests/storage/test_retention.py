"""Which variants a policy drops."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.records import VariantName
from graphkiln.storage.retention import Policy, VariantFacts, dropped_variants
from tests.storage.samples import NOW, QUICK

DAY = timedelta(days=1)


def named(text: str) -> VariantName:
    network, target, variant = text.split("/")
    return network, target, digest_bytes(variant.encode())


def facts(text: str, days: float, *, pinned: bool = False, **sizes: int) -> VariantFacts:
    return VariantFacts(name=named(text), used_at=NOW - days * DAY, pinned=pinned, sizes=sizes)


VARIANTS = [
    facts("a/cpu/new", 1, shared=10, a=1),
    facts("a/cpu/old", 40, shared=10, b=2),
    facts("a/tpu/only", 50, c=4),
    facts("b/cpu/pinned", 60, pinned=True, d=8),
    facts("b/cpu/middle", 20, e=16),
]


@pytest.mark.parametrize(
    ("policy", "dropped"),
    [
        (Policy(), []),
        (Policy(keep_last=1), ["a/cpu/old"]),
        (Policy(keep_last=2), []),
        (Policy(older_than=30 * DAY), ["a/tpu/only", "a/cpu/old"]),
        (Policy(older_than=100 * DAY), []),
        (Policy(max_bytes=41), []),
        (Policy(max_bytes=40), ["a/tpu/only"]),
        (Policy(max_bytes=36), ["a/tpu/only", "a/cpu/old"]),
        # What two variants share is only freed with the second of them.
        (Policy(max_bytes=19), ["a/tpu/only", "a/cpu/old", "b/cpu/middle"]),
        (Policy(max_bytes=18), ["a/tpu/only", "a/cpu/old", "b/cpu/middle", "a/cpu/new"]),
        (Policy(max_bytes=0), ["a/tpu/only", "a/cpu/old", "b/cpu/middle", "a/cpu/new"]),
        (Policy(keep_last=1, max_bytes=30), ["a/cpu/old", "a/tpu/only", "b/cpu/middle"]),
    ],
)
def test_what_is_dropped(policy: Policy, dropped: list[str]) -> None:
    assert dropped_variants(VARIANTS, policy, NOW, rest=0) == [named(text) for text in dropped]


def test_what_is_kept_anyway_counts_for_the_size() -> None:
    assert dropped_variants(VARIANTS, Policy(max_bytes=41), NOW, rest=1) == [named("a/tpu/only")]


@QUICK
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.booleans(), st.integers(0, 9)), max_size=8),
    st.none() | st.integers(1, 3),
    st.none() | st.integers(0, 60),
    st.none() | st.integers(0, 40),
)
def test_no_pinned_variant_is_dropped_and_none_that_need_not_be(
    found: list[tuple[str, int, bool, int]], keep_last: int | None, days: int | None, most: int | None
) -> None:
    variants = [
        facts(f"{network}/cpu/{number}", used, pinned=pinned, **{f"blob{number}": size})
        for number, (network, used, pinned, size) in enumerate(found)
    ]
    policy = Policy(keep_last=keep_last, older_than=None if days is None else days * DAY, max_bytes=most)
    dropped = dropped_variants(variants, policy, NOW, rest=0)
    assert len(set(dropped)) == len(dropped)
    kept = [item for item in variants if item.name not in dropped]
    assert {item.name for item in variants if item.pinned} <= {item.name for item in kept}
    free = [item for item in kept if not item.pinned and item.used_at <= NOW - policy.grace]
    if most is not None and free:
        assert sum(sum(item.sizes.values()) for item in kept) <= most
    if keep_last is not None:
        for network in "ab":
            last = sorted(
                (item for item in variants if item.name[0] == network),
                key=lambda item: (item.used_at, item.name),
                reverse=True,
            )
            assert not {item.name for item in free} & {item.name for item in last[keep_last:]}
    if policy == Policy():
        assert not dropped


def test_what_was_used_a_moment_ago_stays_whatever_the_policy() -> None:
    young = [facts("a/cpu/new", 0.5, a=1), facts("a/cpu/newer", 0.1, b=1)]
    for policy in (Policy(keep_last=1), Policy(older_than=0 * DAY), Policy(max_bytes=0)):
        assert dropped_variants(young, policy, NOW, rest=0) == []
