"""One HTML file with every table and figure of the saved data: speed, verbs, memory, quality, gradients, sampling, applications, vision."""

from __future__ import annotations

import argparse
import base64
import html
import importlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import report_parts, targets
from bench.common import RESULTS, Table, load
from bench.figures._style import style
from bench.report_parts import Part, Rows
from bench.report_text import FACTS, STYLE


def main(argv: list[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m bench report", description=__doc__)
    options.add_argument("--out", type=Path, default=Path("khot-report.html"))
    options.add_argument("--no-figures", action="store_true", help="tables only")
    given = options.parse_args(argv)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(report(figures=not given.no_figures))
    sys.stderr.write(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB\n")
    return 0


def report(*, figures: bool = True) -> str:
    """The whole file. It loads nothing: figures and style are inside."""
    sections = list(_sections(figures))
    links = "".join(f'<a href="#{_anchor(title)}">{html.escape(title)}</a>' for title, _ in sections)
    body = "".join(f'<section id="{_anchor(title)}"><h2>{html.escape(title)}</h2>{text}</section>' for title, text in sections)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>khot, measured</title>'
    intro = "<p>Made from the saved data by <code>python -m bench report</code>. Nothing here was measured while the file was written.</p>"
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head>'
        f"<body><h1>khot, measured</h1>{intro}<nav>{links}</nav>{body}</body></html>\n"
    )


def _sections(figures: bool) -> Iterable[tuple[str, str]]:
    """Title and HTML of every part; a part without data says how to get them."""
    parts = list(report_parts.every())
    yield "Machines and versions", render(_machines())
    yield "What has not been run", _open(parts)
    yield "Aims beside what was measured", _tables(targets.tables())
    for part in parts:
        drawn = _figures(part.figures, part.rows) if figures and part.figures and part.rows else ""
        none = "" if part.rows else _none(part.command)
        yield part.title, f"<p>{_inline(part.about)}</p>{none}{_tables(part.tables)}{drawn}"


def _open(parts: Iterable[Part]) -> str:
    missing = [[part.title, f"`{part.command}`"] for part in parts if not part.rows]
    return render(Table("commands that make it", ["part", "command"], missing)) if missing else "<p>Every part has data.</p>"


def _tables(tables: Iterable[Table]) -> str:
    return "".join(render(table) for table in tables)


def render(table: Table) -> str:
    """A table as HTML; on a narrow screen it scrolls by itself."""
    head = "".join(f"<th>{_inline(str(cell))}</th>" for cell in table.head)
    body = "".join("<tr>" + "".join(f"<td>{_inline(str(cell))}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="note">{_inline(table.note)}</p>' if table.note else ""
    title = f"{table.title[:1].upper()}{table.title[1:]}"
    return f'<h3>{_inline(title)}</h3><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}'


def _machines() -> Table:
    """Which data were measured where and with what."""
    lines: dict[tuple[str, ...], dict[str, None]] = {}
    for path in sorted(RESULTS.rglob("*.jsonl")):
        for row in load(path.stem, path):
            key = (path.stem, *(str(row.get(fact, "not written down")) for fact in FACTS[:-1]))
            lines.setdefault(key, {})[str(row.get("commit", "not written down"))] = None
    body = [[*key, ", ".join(commits)] for key, commits in lines.items()]
    return Table("where every number comes from", ["data", *FACTS], body)


def _figures(name: str, rows: Rows) -> str:
    """The figures of ``bench/figures/NAME.py``, drawn anew and put inside."""
    if importlib.util.find_spec(f"bench.figures.{name}") is None:
        return ""
    with style():
        drawn = importlib.import_module(f"bench.figures.{name}").draw(rows)
        return "".join(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{_png(figure)}">' for title, figure in drawn.items())


def _png(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, bbox_inches="tight")
    figure.clear()
    return base64.b64encode(out.getvalue()).decode()


def _none(command: str) -> str:
    return f'<p class="note">Not measured yet: <code>{html.escape(command)}</code>.</p>'


def _inline(text: str) -> str:
    """Escaped, with Markdown's code and bold marks."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")
