"""The parts of the report: which data, which tables, and the command that makes what is not there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench import page
from bench.applications import NAMES
from bench.common import RESULTS, Table, load
from bench.report_text import ABOUT, HIDDEN, VISION

Rows = list[dict[str, Any]]
MOST = 60  # rows that are shown as they are; more become means


class Part(NamedTuple):
    """A section: its data and how they are shown."""

    title: str
    about: str
    command: str  # that makes the data
    rows: Rows
    tables: list[Table]
    figures: str = ""  # the file of bench/figures


def every() -> Iterator[Part]:
    """What is planned first, then every other file of records."""
    planned = [*_benchmarks(), *_applications(), *_vision()]
    yield from (part for part, _ in planned)
    read = {path for _, paths in planned for path in paths}
    for path in sorted(RESULTS.rglob("*.jsonl")):
        if path not in read and not path.stem.endswith("-quick") and (rows := load(path.stem, path)):
            name = path.stem.replace("_", " ").capitalize()
            yield Part(name, ABOUT.get(path.stem, ""), "", rows, _of(path.relative_to(RESULTS).with_suffix(""), rows))


def _benchmarks() -> Iterator[tuple[Part, list[Path]]]:
    for name, about in page.ABOUT.items():
        rows, path = load(name), RESULTS / f"{name}.jsonl"
        yield Part(name.capitalize(), about, f"python -m bench {name}", rows, _of(Path(name), rows), name), [path]


def _applications() -> Iterator[tuple[Part, list[Path]]]:
    for name in NAMES:
        path = RESULTS / "applications" / f"{name}.jsonl"
        rows = tested(load(name, path))
        about = (_module(Path("applications", name)).__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        command = f"python -m bench applications {name}"
        yield Part(f"Application: {name}", about, command, rows, _of(Path("applications", name), rows)), [path]


def tested(rows: Rows) -> Rows:
    """Without what was run to choose settings."""
    return [row for row in rows if row.get("part") != "validation" and row.get("tested", True)]


def _vision() -> Iterator[tuple[Part, list[Path]]]:
    from bench.vision.page import PARTS

    for name, (files, tables) in PARTS.items():
        paths = [RESULTS / "vision" / f"{file}.jsonl" for file in files]
        rows = [row for path in paths for row in load(path.stem, path)]
        about, command = VISION.get(name, ("", f"python -m bench vision {name}"))
        made = list(tables(rows)) if rows or name == "runs" else []  # the planned runs have a row each, run or not
        yield Part(f"Vision: {name}", about, command, rows, made), paths


def _of(where: Path, rows: Rows) -> list[Table]:
    """By the tables of the benchmark itself; else row by row, or the means of rows that differ in their number alone."""
    module = _module(where) if rows else None
    if hasattr(module, "tables"):
        return list(module.tables(rows))
    if hasattr(module, "table"):
        return [module.table(rows)]
    return [(plain if len(rows) <= MOST else means)(where.name, rows)] if rows else []


def _module(where: Path) -> Any:
    name = ".".join(("bench", *where.parts))
    there = (Path(__file__).parent / where).with_suffix(".py").exists()
    return importlib.import_module(name) if there else None


def plain(name: str, rows: Rows) -> Table:
    """Rows as they are, without what the table of machines says."""
    keys = [key for key in _keys(rows) if key not in HIDDEN]
    return Table(name.replace("_", " "), keys, [[row.get(key, "") for key in keys] for row in rows])


def means(name: str, rows: Rows) -> Table:
    """Rows with the same words and settings as one, with the means of what was measured and their number."""
    keys = [key for key in _keys(rows) if key not in HIDDEN]
    labels = [key for key in keys if _is_label([row.get(key) for row in rows])]
    values = [key for key in keys if key not in labels and all(isinstance(row.get(key, 0.0), bool | float) for row in rows)]
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key, "") for key in labels), []).append(row)
    body = [[*label, len(mine), *(_mean(row[key] for row in mine if key in row) for key in values)] for label, mine in groups.items()]
    return Table(f"{name.replace('_', ' ')}, means", [*labels, "rows", *values], body)


def _is_label(values: list[Any]) -> bool:
    """Words, and numbers of which there are few."""
    if any(isinstance(value, bool | list | dict) for value in values):
        return False
    return all(isinstance(value, str | None) for value in values) or len(set(values)) <= 10


def _mean(values: Iterable[float]) -> str:
    found = [float(value) for value in values]
    return f"{sum(found) / len(found):.4g}" if found else ""


def _keys(rows: Rows) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))
