"""What the pages say of the tests is true."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/.]+?)(?:::(\w+))?[`:]", page.read_text()):
        assert (ROOT / path).exists(), path
        if name:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_public_report_has_its_test() -> None:
    rows = [line for line in (ROOT / "docs" / "known-failures.md").read_text().splitlines() if "::test_" in line]
    assert len(rows) == 15
