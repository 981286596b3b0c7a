"""Nothing on the site that looks like code escapes the tests: what is Python runs, what is a command exists, the rest is no code."""

from __future__ import annotations

import ast
import re
import shlex
from importlib.metadata import metadata
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.__main__ import commands
from khot.cli import _parser
from tests.test_contributing import STEP
from tests.test_readme import BLOCK, PAGES, ROOT

FENCE = re.compile(r"^ *(`{3,}|~{3,})(.*)$", re.MULTILINE)
TEXT = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
BASH = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINES = sorted({line for page in PAGES for block in BASH.findall(page.read_text()) for line in block.splitlines() if line.strip()})


def opened(text: str) -> list[str]:
    """The language of every fence; fences come in pairs."""
    marks = FENCE.findall(text)
    assert len(marks) % 2 == 0 and all(not after for _, after in marks[1::2])
    return [language for _, language in marks[::2]]


def alone(text: str) -> list[str]:
    """The text blocks that are not what the code before them prints, which the tests of the pages compare."""
    return TEXT.findall(BLOCK.sub("", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_python_block_is_among_those_that_run(page: Path) -> None:
    languages = opened(page.read_text())
    assert set(languages) <= {"python", "text", "bash"}
    assert languages.count("python") == len(BLOCK.findall(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_text_is_what_code_prints_or_no_code(page: Path) -> None:
    for text in alone(page.read_text()):
        with pytest.raises(SyntaxError):
            ast.parse(text)


def test_every_block_of_contributing_is_a_recipe_that_is_followed() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert opened(text) == ["python"] * len(STEP.findall(text))


def test_blocks_that_would_escape_are_noticed() -> None:
    assert opened("```py\nx = 1\n```\n  ```text\nx\n  ```\n") == ["py", "text"]
    assert alone("```python\nprint(1)\n```\n```text\n1\n```\n```text\nx = 1\n```\n") == ["x = 1\n"]


@pytest.mark.parametrize("line", LINES)
def test_commands_are_there(line: str) -> None:
    words = shlex.split(line, comments=True)
    program, *rest = words[words.index("-m") + 1 :] if "-m" in words else words
    KNOWN[program](rest)


def _pip(words: list[str]) -> None:
    extras = metadata("khot").get_all("Provides-Extra")
    assert words[0] == "install"
    for wanted in words[1:]:
        found = re.fullmatch(r"(?:\.|khot)(?:\[([\w,]+)\])?", wanted)
        assert found, wanted
        assert set((found[1] or "").split(",")) <= {*(extras or []), ""}


def _make(words: list[str]) -> None:
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def _bench(words: list[str]) -> None:
    assert not words or words[0] in commands()
    if words[:1] == ["applications"] and words[1:]:
        from bench.applications import NAMES

        assert words[1] in (*NAMES, "NAME", "page")


def _khot(words: list[str]) -> None:
    if words[0] == "train":  # it has a parser of its own; dots stand for what a reader fills in
        pytest.importorskip("jsonargparse", reason="khot[train]")
        from khot.train.config import parse

        parse([word for word in words[1:] if word != "..."])
    else:
        _parser().parse_args(words)


def _curl(words: list[str]) -> None:
    pytest.importorskip("httpx2", reason="Starlette's test client needs it")
    from starlette.testclient import TestClient

    from khot.explore.server import application

    asked = urlsplit(words[0])
    with TestClient(application(), base_url=f"{asked.scheme}://{asked.netloc}") as page:
        assert page.get(f"{asked.path}?{asked.query}").status_code == 200


def _script(words: list[str]) -> None:
    assert (ROOT / words[0]).exists()


KNOWN = {"pip": _pip, "make": _make, "bench": _bench, "khot": _khot, "curl": _curl, "python": _script}
