"""The report is one file, has every part, says what was not measured, and shows the numbers of the data."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench import page, report, report_parts
from bench.__main__ import commands
from bench.__main__ import main as bench
from bench.applications import NAMES
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
        "What has not been run",
        *(f"Application: {name}" for name in NAMES),
        *(f"Vision: {name}" for name in ("runs", "canvas", "reduction", "throughput")),
        "Certified pruning",
        "Distributed",
    ):
        assert f"<h2>{title}</h2>" in text
    for name in ("speed", "quality"):
        row = load(name)[-1]
        assert row["commit"] in text and row["torch"] in text and row["cpu"] in text


def test_numbers_are_those_of_the_data(text: str) -> None:
    rows = [row for row in load("certified_pruning") if (row["net"], row["domain"], row["eps"]) == ("pruned", "affine", 0.0005)]
    mean = sum(row["width"] for row in rows) / len(rows)
    assert f"<td>affine</td><td>0.0005</td><td>{len(rows)}</td>" in text and f"<td>{mean:.4g}</td>" in text
    assert "khot train --recipe imagenet" in text  # vision that was not run


def test_every_file_of_records_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one that no list names, and means in place of many rows."""
    monkeypatch.setattr(report_parts, "RESULTS", tmp_path)
    (tmp_path / "applications").mkdir()
    lines = [{"row": row, "seed": seed, "error": seed + 0.5, "right": seed % 2 == 0} for row in ("a", "b") for seed in range(40)]
    (tmp_path / "applications" / "unheard_of.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "nameless.jsonl").write_text(json.dumps(lines[3]))
    found = {part.title: part.tables for part in report_parts.every()}
    assert found["Unheard of"] == [
        ("unheard of, means", ["row", "rows", "error", "right"], [["a", 40, "20", "0.5"], ["b", 40, "20", "0.5"]], "")
    ]
    assert found["Nameless"] == [("nameless", ["row", "seed", "error", "right"], [["a", 3, 3.5, False]], "")]


def test_rows_that_chose_settings_are_left_out() -> None:
    assert report_parts.tested([{"part": "validation"}, {"part": "test"}, {"tested": False}, {}]) == [{"part": "test"}, {}]


def test_a_part_without_data_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (report, report_parts):
        monkeypatch.setattr(module, "load", lambda name, path=None: [])
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    made = report.report(figures=False)
    for command in ("memory", "applications features", "vision throughput"):
        assert f"Not measured yet: <code>python -m bench {command}</code>" in made
        assert f"<td><code>python -m bench {command}</code></td>" in made


def test_cells_are_escaped() -> None:
    made = report.render(Table("a <b>", ["`x`"], [["<script>"], ["**new**"]], "1 < 2"))
    assert "<script>" not in made and "&lt;script&gt;" in made and "<code>x</code>" in made and "<b>new</b>" in made


def test_figures_are_inside() -> None:
    pytest.importorskip("matplotlib")
    assert report._figures("quality", load("quality")).startswith('<img alt="quality" src="data:image/png;base64,iVBOR')
    assert report._figures("verbs", load("verbs")) == ""
