import pytest

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.sizes import parse_size


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
