"""Sets of ranks, kept as ranges: a placement grows with distinct kernel graphs, never with ranks."""

import re
from collections.abc import Iterable, Iterator

import msgspec

# Far above any cluster, and exact in any JSON reader.
_MAX_RANKS = 2**53

_ITEM = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


class RankSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ranks as sorted, disjoint, non-touching half-open ranges ``(start, stop)``."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        previous_stop = -1
        if self.ranges and self.ranges[-1][1] > _MAX_RANKS:
            raise ValueError(f"rank {self.ranges[-1][1] - 1} is too large: ranks end at {_MAX_RANKS - 1}")
        for start, stop in self.ranges:
            if not previous_stop < start < stop:
                raise ValueError(f"rank ranges {self.ranges} are not sorted and disjoint")
            previous_stop = stop

    @staticmethod
    def of(ranks: Iterable[int]) -> "RankSet":
        """Make a set out of single ranks; a `range` of step 1 costs nothing however long it is.

        Raises:
            ValueError: a rank is negative or not a whole number.
        """
        if isinstance(ranks, range) and ranks.step == 1 and ranks.start >= 0:
            return RankSet(((ranks.start, ranks.stop),) if len(ranks) else ())
        ranges: list[tuple[int, int]] = []
        for rank in sorted(set(ranks)):
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
                raise ValueError(f"{rank!r} is not a rank; ranks are whole numbers from 0")
            if ranges and ranges[-1][1] == rank:
                ranges[-1] = (ranges[-1][0], rank + 1)
            else:
                ranges.append((rank, rank + 1))
        return RankSet(tuple(ranges))

    @staticmethod
    def parse(text: str) -> "RankSet":
        """Read what a user writes: ``"13"``, ``"0-15,32"`` (both ends belong to the set).

        Raises:
            ValueError: the text is something else.
        """
        ranges: list[RankSet] = []
        for item in text.split(","):
            match = _ITEM.fullmatch(item)
            if match is None:
                raise ValueError(f"{text!r} is not a list of ranks such as 13 or 0-15,32")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ValueError(f"the range {item.strip()} in {text!r} ends before it starts")
            ranges.append(RankSet(((first, last + 1),)))
        return RankSet().union(*ranges)

    def union(self, *others: "RankSet") -> "RankSet":
        """Return the ranks of all of them."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(span for ranks in (self, *others) for span in ranks.ranges):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return RankSet(tuple(merged))

    def meets(self, other: "RankSet") -> bool:
        """Tell whether the two sets share a rank."""
        return any(a < d and c < b for a, b in self.ranges for c, d in other.ranges)

    def __contains__(self, rank: int) -> bool:
        return any(start <= rank < stop for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.ranges:
            yield from range(start, stop)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __str__(self) -> str:
        """Return the form that `parse` reads: ``"0-15,32"``."""
        return ",".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in self.ranges)
