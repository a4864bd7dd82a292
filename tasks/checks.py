"""Checks of what users write that several modules share."""

import difflib
from collections.abc import Iterable

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.ranks import RankSet


def refuse_unknown(given: Iterable[str], known: Iterable[str], *, what: str, reason: str, listed: bool = False) -> None:
    """Accept only names that are known.

    Args:
        given: the names that a user wrote.
        known: the names that there are.
        what: what the names stand for, such as ``"option of backend 'command'"``.
        reason: `BadInputError.reason` of the refusal.
        listed: whether the message has all known names even if one of them is near.

    Raises:
        BadInputError: a name is not known; the message has the nearest one that is, or else all of them.
    """
    names = sorted(known)
    for name in sorted(set(given).difference(names)):
        near = difflib.get_close_matches(name, names, n=1)
        there_are = f"there are: {', '.join(names) or 'none'}"
        hint = there_are if not near else f"did you mean {near[0]!r}?{f' ({there_are})' if listed else ''}"
        raise BadInputError(f"unknown {what}: {name!r}; {hint}", reason=reason)


def parse_ranks(text: str | None) -> RankSet | None:
    """Read the ranks that a user asks for, such as ``"13"`` or ``"0-15,32"``; all of them if None.

    Raises:
        BadInputError: the text is something else.
    """
    try:
        return None if text is None else RankSet.parse(text)
    except ValueError as error:
        raise BadInputError(str(error), reason="bad-ranks") from error
