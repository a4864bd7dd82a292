from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln.storage.canonical import canonical_json
from graphkiln.storage.ranks import RankSet
from tests.storage.samples import QUICK

models = st.sets(st.integers(0, 40), max_size=20)


@QUICK
@given(models, models)
def test_it_does_what_a_set_does(one: set[int], other: set[int]) -> None:
    ranks, others = RankSet.of(one), RankSet.of(other)
    assert list(ranks) == sorted(one)
    assert len(ranks) == len(one)
    assert {rank for rank in range(-1, 42) if rank in ranks} == one
    assert list(ranks.union(others)) == sorted(one | other)
    assert ranks.meets(others) == bool(one & other)
    assert (ranks == others) == (one == other)


@QUICK
@given(st.lists(models, max_size=5))
def test_a_union_of_many_is_the_union(many: list[set[int]]) -> None:
    assert RankSet().union(*map(RankSet.of, many)) == RankSet.of(set[int]().union(*many))


@QUICK
@given(models.filter(bool))
def test_its_text_is_read_as_the_same_ranks(model: set[int]) -> None:
    ranks = RankSet.of(model)
    assert RankSet.parse(str(ranks)) == ranks
    assert msgspec.convert(msgspec.to_builtins(ranks), RankSet) == ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("13", {13}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        (" 5 , 0 - 1 ", {0, 1, 5}),
        ("3,1,2,2-4", {1, 2, 3, 4}),
        ("7-7", {7}),
        ("007", {7}),
    ],
)
def test_users_may_write(text: str, ranks: set[int]) -> None:
    assert set(RankSet.parse(text)) == ranks


@pytest.mark.parametrize(
    "text",
    ["", ",", "1,", "-1", "1-", "3-1", "a", "1;2", "1.5", "1--2", "0x1", "1-2-3", pytest.param("9" * 5000, id="9s")],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        RankSet.parse(text)


@pytest.mark.parametrize("ranks", [[-1], [1.0], [True], ["1"], range(-2, 3), range(3, -2, -1), range(-1, 0)], ids=repr)
def test_what_is_no_rank_is_refused(ranks: Any) -> None:
    with pytest.raises(ValueError):
        RankSet.of(ranks)


@pytest.mark.parametrize("ranks", [range(0), range(5, 3), range(0, 9, 2), range(8, 2, -1), range(4, 9)], ids=repr)
def test_any_range_is_what_it_lists(ranks: range) -> None:
    assert list(RankSet.of(ranks)) == sorted(ranks)


@pytest.mark.parametrize(
    "ranges",
    [((1, 1),), ((2, 1),), ((0, 2), (2, 3)), ((0, 2), (1, 3)), ((3, 4), (0, 1)), ((-1, 2),)],
    ids=repr,
)
def test_ranges_that_are_not_sorted_disjoint_and_apart_are_refused(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError):
        RankSet(ranges)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"ranges": ranges}, RankSet)


def test_a_placement_of_ten_thousand_ranks_stays_small() -> None:
    placement = [RankSet.of(range(first, first + 2500)) for first in range(0, 10_000, 2500)]
    assert sum(map(len, placement)) == 10_000
    assert len(canonical_json(msgspec.to_builtins(placement))) < 150
    assert RankSet().union(*placement).ranges == ((0, 10_000),)
    assert len(RankSet.of(range(10**12))) == 10**12
