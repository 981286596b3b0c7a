"""The notebooks run from top to bottom, hold their last outputs, and stay small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import notebooks

pytest.importorskip("matplotlib", reason="the notebooks draw with it")
pytest.importorskip("sklearn", reason="the notebooks take its digits")

PATHS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_runs_and_shows_what_it_showed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may differ in the last digits between machines, so the kinds of outputs are compared; the cells assert the rest."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    kept, made = json.loads(path.read_text()), notebooks.run(path)
    kinds = [[[output["output_type"] for output in cell.get("outputs", [])] for cell in book["cells"]] for book in (kept, made)]
    assert kinds[0] == kinds[1], "run `python -m tools.notebooks notebooks/*.ipynb`"
    assert path.stat().st_size < 100_000


def test_the_mixture_of_experts_has_80_lines() -> None:
    (path,) = (path for path in PATHS if path.stem == "mixture_of_experts")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert sum(1 for cell in cells for line in cell["source"] if line.strip()) <= 80


def test_an_error_in_a_cell_is_raised(tmp_path: Path) -> None:
    book = {"cells": [{"cell_type": "code", "source": ["x = 1\n", "x / 0"]}]}
    (tmp_path / "bad.ipynb").write_text(json.dumps(book))
    with pytest.raises(ZeroDivisionError):
        notebooks.run(tmp_path / "bad.ipynb")
