"""Which variants a collection keeps: pure facts and a policy, no I/O."""

from collections.abc import Container, Iterable, Mapping
from datetime import datetime, timedelta

import msgspec

from graphkiln.storage.records import VariantName


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection takes away. By default, only what no variant and no pin needs any more.

    Attributes:
        keep_last: of each network and target, keep only so many variants, those used last.
        older_than: drop variants that no run has used for so long.
        max_bytes: drop the variants that were used longest ago until the store holds at most so many bytes.
        grace: keep what was written within this time, whoever may need it, manifests that were replaced in it, and
            variants that were used in it.
    """

    keep_last: int | None = None
    older_than: timedelta | None = None
    max_bytes: int | None = None
    grace: timedelta = timedelta(days=1)


class VariantFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy looks at.

    Attributes:
        name: network, target and variant.
        used_at: when a run last compiled, committed or used it.
        pinned: whether a pin holds it.
        sizes: bytes of everything that it needs and that is not kept anyway, by path.
    """

    name: VariantName
    used_at: datetime
    pinned: bool
    sizes: Mapping[str, int]


def dropped_variants(variants: Iterable[VariantFacts], policy: Policy, now: datetime, rest: int) -> list[VariantName]:
    """Return the variants that the policy drops, those used longest ago first.

    Those that are pinned, or were used within the grace period, are never dropped.

    Args:
        variants: all variants.
        policy: what to drop.
        now: the time.
        rest: bytes that are kept whatever becomes of the variants.
    """
    newest_first = sorted(variants, key=lambda item: (item.used_at, item.name), reverse=True)
    stays = {item.name for item in newest_first if item.pinned or item.used_at > now - policy.grace}
    kept: list[VariantFacts] = []
    dropped: list[VariantName] = []
    seen: dict[tuple[str, str], int] = {}
    for item in newest_first:
        place = item.name[:2]
        seen[place] = seen.get(place, 0) + 1
        too_many = policy.keep_last is not None and seen[place] > policy.keep_last
        too_old = policy.older_than is not None and item.used_at < now - policy.older_than
        if (too_many or too_old) and item.name not in stays:
            dropped.append(item.name)
        else:
            kept.append(item)
    dropped.reverse()
    if policy.max_bytes is not None:
        dropped += _over_size(kept, policy.max_bytes - rest, stays)
    return dropped


def _over_size(newest_first: list[VariantFacts], most: int, stays: Container[VariantName]) -> list[VariantName]:
    users: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for item in newest_first:
        sizes.update(item.sizes)
        for path in item.sizes:
            users[path] = users.get(path, 0) + 1
    total = sum(sizes.values())
    dropped: list[VariantName] = []
    for item in reversed(newest_first):
        if total <= most:
            break
        if item.name in stays:
            continue
        dropped.append(item.name)
        for path in item.sizes:
            users[path] -= 1
            if not users[path]:
                total -= sizes[path]
    return dropped
