"""Draw every figure from the data in bench/results, as PNG and SVG into docs/figures."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from bench.common import load
from bench.figures._style import style

FIGURES = Path(__file__).parent / "figures"
DOCS = Path(__file__).parent.parent / "docs" / "figures"


def main(argv: list[str]) -> int:
    """Each file in bench/figures with ``draw(rows) -> {name: figure}`` draws the data of the benchmark of the same name."""
    options = argparse.ArgumentParser(prog="python -m bench plot", description=__doc__)
    options.add_argument("names", nargs="*", help="benchmarks to draw, default all that have data")
    options.add_argument("--out", type=Path, default=DOCS)
    options.add_argument("--data", type=Path, help="a data file, for one name")
    given = options.parse_args(argv)
    drawable = [path.stem for path in sorted(FIGURES.glob("*.py")) if "\ndef draw(" in path.read_text()]
    if unknown := set(given.names) - set(drawable):
        raise SystemExit(f"nothing draws {', '.join(sorted(unknown))}; choose from {', '.join(drawable)}")
    for name in given.names or drawable:
        draw_one(name, given.out, given.data)
    return 0


def draw_one(name: str, out: Path, data: Path | None = None) -> list[Path]:
    """Draw the figures of one benchmark; the files that were written."""
    rows = load(name, data)
    if not rows:
        sys.stderr.write(f"no data for {name}: run `python -m bench {name}` first\n")
        return []
    module = importlib.import_module(f"bench.figures.{name}")
    out.mkdir(parents=True, exist_ok=True)
    with style():
        return [path for title, figure in module.draw(rows).items() for path in _save(figure, out / title)]


def _save(figure: Any, stem: Path) -> list[Path]:
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in paths:
        figure.savefig(path, dpi=160, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    figure.clear()
    sys.stderr.write(f"{paths[0]}\n")
    return paths
