import pytest

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.quantities import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("50GB", 50 * 10**9),
        ("50 gb", 50 * 10**9),
        (" 1.5TB ", 1_500_000_000_000),
        ("20GiB", 20 * 2**30),
        ("1KiB", 1024),
        ("2kB", 2000),
        ("2k", 2000),
        ("3mib", 3 * 2**20),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1e9", "1,5GB", "5 G B", "5XB", "5iB", "1.GB", "٣GB", "nan", "0x10", "10%"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="is no size") as caught:
        parse_size(text)
    assert caught.value.reason == "bad-size"


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("90m", 5400), (" 1.5h ", 5400), ("30d", 2592000), ("2 w", 1209600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1y", "9" * 40 + "w", "1d2h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(BadInputError, match="is no duration"):
        parse_duration(text)
