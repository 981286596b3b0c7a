"""The report is one file, has every part, says what was not measured, and shows the numbers of the data."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench import page, report
from bench.__main__ import commands
from bench.__main__ import main as bench
from bench.common import Table, load


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("report") / "made" / "report.html"
    assert "report" in commands()
    assert bench(["report", "--no-figures", "--out", str(out)]) == 0
    return out.read_text()


class Balance(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {str(given["id"])} if "id" in given else set()
        self.links |= {str(given["href"])} if "href" in given else set()
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_is_one_sound_file_that_loads_nothing(text: str) -> None:
    parsed = Balance()
    parsed.feed(text)
    assert parsed.open == []
    assert parsed.links == {f"#{name}" for name in parsed.ids}
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", text) and "<script" not in text and "@import" not in text


def test_every_part_is_there(text: str) -> None:
    for title in (
        "Machines and versions",
        *(name.capitalize() for name in page.ABOUT),
        "Application: features",
        "Vision",
        "Certified pruning",
    ):
        assert f"<h2>{title}</h2>" in text
    for name in ("speed", "quality"):
        row = load(name)[-1]
        assert row["commit"] in text and row["torch"] in text and row["cpu"] in text


def test_numbers_are_those_of_the_data(text: str) -> None:
    for row in load("certified_pruning"):
        assert f"<td>{row['width']}</td>" in text
    assert "python -m khot train" in text or "khot train" in text  # vision that was not run


def test_a_part_without_data_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "load", lambda name, path=None: [])
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "Not measured yet: <code>python -m bench memory</code>" in report.report(figures=False)


def test_cells_are_escaped() -> None:
    made = report.render(Table("a <b>", ["`x`"], [["<script>"], ["**new**"]], "1 < 2"))
    assert "<script>" not in made and "&lt;script&gt;" in made and "<code>x</code>" in made and "<b>new</b>" in made


def test_figures_are_inside() -> None:
    pytest.importorskip("matplotlib")
    assert report._figures("quality", load("quality")).startswith('<img alt="quality" src="data:image/png;base64,iVBOR')
    assert report._figures("verbs", load("verbs")) == ""
