"""The page of a report: all in one file, nothing from elsewhere, whatever the names are."""

import re
import sys
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from graphkiln.flows.report import CatalogReport, report_on
from graphkiln.flows.report_page import page_of, write_page
from graphkiln.storage.catalog import write_part
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.store import Store
from tests.storage.catalogs import START, history, row
from tests.storage.faults import DictFilesystem

NASTY = "<script>alert('a & b')</script> $x^2$ \"q\" {body}"
# Elements and attributes by which a page can load something or run something.
LOADING = {"script", "link", "img", "iframe", "object", "embed", "base", "image", "audio", "video", "form", "style"}


@pytest.fixture(scope="module")
def report() -> CatalogReport:
    store = Store(DictFilesystem({}))
    for rows in history(30, 6):
        write_part(store, rows)
    names = {"network": NASTY, "target": NASTY, "host": NASTY}
    write_part(store, [row("nasty", NASTY, time=START + timedelta(days=3), compile_seconds=1e9, **names)])
    return report_on(store)


@pytest.fixture(scope="module")
def text(report: CatalogReport) -> str:
    return page_of(report)


class Page(HTMLParser):
    """What is in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


def drawing_in(text: str) -> str:
    found = re.search(r"<svg.*</svg>", text, re.DOTALL)
    assert found
    return found[0]


def test_the_page_loads_and_runs_nothing(text: str) -> None:
    page = Page(text)
    assert LOADING.intersection(page.elements) == {"style"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "action", "data")]
    assert all(value is not None and value.startswith("#") for value in links)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_names_are_shown_as_they_are(text: str) -> None:
    page = Page(text)
    assert page.text.count(NASTY) >= 4  # its row by network, and network, target, kernel graph and host of the slowest
    assert "<script" not in text
    labels = [element.text for element in ET.fromstring(drawing_in(text)).iter() if element.text]  # noqa: S314
    assert NASTY in labels


def test_every_figure_is_in_the_page(text: str, report: CatalogReport) -> None:
    shown = set(Page(text).text)
    assert set(report.networks) <= shown
    assert set(report.days) <= shown
    assert {"cached", "compiled", "failed", "blocked", "saved", "spent", "new"} <= shown


def test_the_plots_have_the_page_s_own_colour_and_are_drawn_alike_each_time(text: str, report: CatalogReport) -> None:
    drawing = drawing_in(text)
    assert "currentColor" in drawing
    assert not re.search(r"(fill|stroke): #(000000|ffffff|010203)", drawing)
    assert "color-scheme: light dark" in text
    assert page_of(report) == text
    names = re.findall(r' id="([^"]*)"', text)
    assert len(names) == len(set(names))
    for plot in ("kernel graphs by day", "hours of compiling by day", "growth", "hours of compiling by network"):
        assert plot in drawing


def test_a_report_of_one_run_and_one_of_none_have_pages() -> None:
    store = Store(DictFilesystem({}))
    text = page_of(report_on(store))
    assert "the catalogue of dict has no runs" in text
    assert "<svg" not in text
    write_part(store, [row(outcome="blocked")])
    assert drawing_in(page_of(report_on(store)))


def test_damaged_parts_are_named() -> None:
    filesystem = DictFilesystem({})
    path = write_part(Store(filesystem), [row()])
    filesystem.objects[path] = b"damaged"  # and no row is left to plot
    assert path in page_of(report_on(Store(filesystem)))


def test_without_matplotlib_there_is_an_error_that_says_what_to_install(
    report: CatalogReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BadInputError, match=r"pip install 'graphkiln\[report\]'") as caught:
        write_page(report, tmp_path / "page.html")
    assert caught.value.reason == "extra-not-installed"
    assert list(tmp_path.iterdir()) == []


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    report = report_on(Store(DictFilesystem({})))
    page = tmp_path / "page.html"
    page.write_text("before")
    write_page(report, page)
    assert page.read_text() == page_of(report)
    (tmp_path / "folder.html").mkdir()
    for wrong in (tmp_path / "folder.html", tmp_path / "missing" / "page.html", page / "page.html"):
        with pytest.raises(BadInputError, match=r"page.html|folder.html") as caught:
            write_page(report, wrong)
        assert caught.value.reason == "bad-output"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.html", "page.html"]
