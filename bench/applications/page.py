"""Write the tables of the pages on applications anew from the records, each between its two marks."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

from bench.common import RESULTS, load

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("applications.md", "dynamics.md", "dictionaries.md", "neighbours.md", "beams.md")
MARKS = re.compile(r"<!-- measured (\w+) -->\n.*?<!-- measured end -->", re.DOTALL)


def main(argv: list[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m bench applications page", description=__doc__)
    options.add_argument("--out", type=Path, nargs="+", default=[DOCS / name for name in PAGES], help="the pages, default all of them")
    for page in options.parse_args(argv).out:
        page.write_text(MARKS.sub(lambda found: section(found[1]), page.read_text()))
    return 0


def section(name: str) -> str:
    """Where it was measured, and every table of what has been run; with its marks, so that it can be written again."""
    rows = load(name, RESULTS / "applications" / f"{name}.jsonl")
    parts = [where(rows), *(table.markdown() for table in _tables(name, rows))] if rows else ["This table has not been run."]
    body = "\n\n".join(parts)
    return f"<!-- measured {name} -->\n{body}\n<!-- measured end -->"


def _tables(name: str, rows: list[dict[str, Any]]) -> list[Any]:
    tested = [row for row in rows if row.get("part") != "validation" and row.get("tested", True)]
    return importlib.import_module(f"bench.applications.{name}").tables(tested)


def where(rows: list[dict[str, Any]]) -> str:
    row, commits = rows[-1], dict.fromkeys(row["commit"] for row in rows)
    machine = f"{row['cpu']}, {row['cores']} cores, {row['isa']}; Python {row['python']}, torch {row['torch']}"
    return f"Measured on {machine}; {len(rows)} cells at {', '.join(f'`{commit}`' for commit in commits)}."
