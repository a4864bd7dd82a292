"""What users write as lengths of time."""

from datetime import timedelta

import pytest

from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.checks import parse_age


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("30d", timedelta(days=30)),
        ("12h", timedelta(hours=12)),
        (" 4 w ", timedelta(weeks=4)),
        ("90m", timedelta(minutes=90)),
        ("0s", timedelta()),
        ("99999w", timedelta(weeks=99999)),
    ],
)
def test_lengths_of_time(text: str, age: timedelta) -> None:
    assert parse_age(text) == age


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5h", "1e3s", "3 fortnights", "100000w", "1d 2h", "٣d"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(BadInputError, match="is not a length of time such as 12h, 30d or 4w") as caught:
        parse_age(text)
    assert caught.value.reason == "bad-age"
