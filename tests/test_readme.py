"""The documents tell the truth: their code runs, and their tables are the registry's."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from khot import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run_in_order_and_print_what_they_say(page: Path) -> None:
    """A ``text`` block right after a ``python`` block is what the latter prints."""
    names: dict[str, object] = {}
    torch.manual_seed(0)
    for code, said in BLOCK.findall(page.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), names)
        if said:
            assert printed.getvalue().split() == said.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_the_registry(page: Path) -> None:
    assert tables.fill(page.read_text()) == page.read_text(), "run `make tables`"


def test_a_stale_table_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: methods -->\nold\n<!-- end -->\n")
    assert tables.main(["--check", str(page)]) == 1
    assert tables.main([str(page)]) == 0
    assert tables.main(["--check", str(page)]) == 0
    assert "`sigmoid`" in page.read_text()


def test_the_readme_has_the_first_screen() -> None:
    text = (ROOT / "README.md").read_text()
    for part in ("pip install", "docs/figures/demo.png", "torch.topk", "make demo", "make test", "<!-- table: methods -->"):
        assert part in text
    assert (ROOT / "docs/figures/demo.png").stat().st_size > 10_000
