"""Checks of what users write that several modules share."""

import difflib
import re
from collections.abc import Iterable
from datetime import timedelta

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.ranks import RankSet

_AGE = re.compile(r"([0-9]{1,5})\s*([smhdw])")
_AGE_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


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


def parse_age(text: str) -> timedelta:
    """Read a length of time that a user wrote: ``"90m"``, ``"12h"``, ``"30d"``, ``"4w"``.

    Raises:
        BadInputError: the text is something else.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise BadInputError(
            f"{text!r} is not a length of time such as 12h, 30d or 4w (s, m, h, d and w are the units)",
            reason="bad-age",
        )
    return timedelta(**{_AGE_UNITS[match[2]]: int(match[1])})
