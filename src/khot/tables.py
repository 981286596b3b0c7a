"""The registry as tables: for the terminal, and between markers in Markdown files.

``python -m khot.tables README.md docs`` rewrites everything between ``<!-- table: NAME -->`` and ``<!-- end -->``;
with ``--check`` it only tells which files are out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import khot

Rows = list[list[str]]

_RELAXATION_FLAGS = {
    "sums_to_k": "sums to k",
    "smooth": "smooth",
    "sparse": "sparse",
    "grad_k": "∂k",
    "grad_tau": "∂τ",
}
_DESIGN_FLAGS = {
    "exact": "exact π",
    "fixed_size": "size k",
    "log_prob": "log p",
    "positive_joint": "joint > 0",
    "vmaps": "vmap",
    "compiles": "compile",
}
_PROMISES = ("grad_k", "grad_tau", "sparse", "smooth", "sums_to_k")  # shown in columns of their own
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def methods() -> Rows:
    """One row per relaxation, header first."""
    header = ["method", "returns", *_RELAXATION_FLAGS.values(), "cost", "does not keep", "paper"]
    return [header, *(_method(row) for _, row in sorted(khot.RELAXATIONS.items()))]


def options() -> Rows:
    """The options of each relaxation that has any, with their defaults."""
    chosen = [row for _, row in sorted(khot.RELAXATIONS.items()) if row.options]
    return [["method", "options"], *([f"`{row.name}`", _options(row)] for row in chosen)]


def designs() -> Rows:
    """One row per sampling design, header first."""
    header = ["design", *_DESIGN_FLAGS.values(), "cost", "note", "paper"]
    return [header, *(_design(row) for _, row in sorted(khot.DESIGNS.items()))]


TABLES = {"methods": methods, "options": options, "designs": designs}


def markdown(rows: Rows) -> str:
    """A Markdown table; the first row is the header."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    ruler = ["---" if i in (0, len(head) - 1) or len(name) > 9 else ":-:" for i, name in enumerate(head)]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ruler, *body])


def fill(text: str) -> str:
    """``text`` with every marked table written anew."""
    return _MARKED.sub(lambda match: match[1] + markdown(TABLES[match[2]]()) + match[3], text)


def _method(row: Any) -> list[str]:
    returns = "mask, matrix" if row.kind == "matrix" else "mask"
    flags = [_tick(getattr(row, name)) for name in _RELAXATION_FLAGS]
    return [f"`{row.name}`", returns, *flags, row.cost, ", ".join(_broken(row)), row.paper]


def _options(row: Any) -> str:
    return ", ".join(f"`{name}={_short(value)}`" for name, value in row.options.items())


def _design(row: Any) -> list[str]:
    return [f"`{row.name}`", *(_tick(getattr(row, name)) for name in _DESIGN_FLAGS), row.cost, row.note, row.paper]


def _broken(row: Any) -> Iterable[str]:
    """The laws that a row says it cannot keep, in words."""
    fields: Mapping[str, Any] = vars(row)
    return (name.replace("_", " ") for name, value in fields.items() if value is False and name not in _PROMISES)


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _tick(value: object) -> str:
    return "✓" if value else "·"


def _pages(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m khot.tables", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="Markdown files, or folders of them")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is out of date")
    given = parser.parse_args(arguments)
    stale = [page for page in _pages(given.paths) if fill(page.read_text()) != page.read_text()]
    for page in stale:
        sys.stderr.write(f"{page}: {'out of date; run `make tables`' if given.check else 'written'}\n")
        if not given.check:
            page.write_text(fill(page.read_text()))
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
