"""What the site makes by itself: its pages run, know every row and every law, and its link check finds what is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

import khot
from khot.registry import Relaxation
from tests.test_readme import BLOCK
from tools import links

pytest.importorskip("matplotlib", reason="the site draws with it")
from docs import pages, pictures

PAGES = dict(pages.every())


@pytest.mark.parametrize("path", PAGES)
def test_generated_code_prints_what_the_page_says(path: str) -> None:
    ((code, said),) = BLOCK.findall(PAGES[path])
    assert said and pages.printed(code).split() == said.split()


def test_every_row_has_a_page_and_a_picture() -> None:
    names = [*(f"methods/{name}.md" for name in khot.RELAXATIONS), *(f"designs/{name}.md" for name in khot.DESIGNS)]
    assert sorted(PAGES) == sorted(names)
    drawn = {name for name, _ in pictures.every()}
    for path, text in PAGES.items():
        kind, name = path.removesuffix(".md").split("/")
        assert f"{kind[:-1]}_{name}" in drawn and f"figures/made/{kind[:-1]}_{name}.svg" in text


def test_every_law_is_explained() -> None:
    flags = {name for name, kind in Relaxation.__annotations__.items() if kind == "bool"}
    assert set(pages.LAWS) == flags


@pytest.mark.parametrize("name", ["shapes", "choosing", "method_euclidean", "design_gumbel"])
def test_pictures_are_drawn(name: str) -> None:
    text = pictures.svg(dict(pictures.every())[name])
    assert text.lstrip().startswith("<?xml") and text.rstrip().endswith("</svg>") and len(text) > 5000


def test_the_link_check_finds_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="b.html#there">x</a><a href="#top">x</a><a href="https://example.org">x</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p><img src="data:image/png;base64,">')
    assert links.problems(tmp_path) == [] and links.main([str(tmp_path)]) == 0
    bad = '<a href="c.html">x</a><a href="b.html#gone">x</a><script src="https://cdn.example/x.js"></script><img src="x.png">'
    (tmp_path / "bad.html").write_text(bad)
    links.parsed.cache_clear()
    found = links.problems(tmp_path)
    assert [said.split(": ")[1] for said in found] == [
        "c.html leads nowhere",
        "b.html#gone names no place on b.html",
        "loads https://cdn.example/x.js from elsewhere",
        "loads x.png, which is not there",
    ]
    assert links.main([str(tmp_path)]) == 1
