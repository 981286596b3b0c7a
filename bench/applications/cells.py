"""Tables made of cells: each is run once, written as a JSON line, and skipped the next time."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import RESULTS, Recorder, Table, parser, progress

DATA = Path.home() / ".cache" / "khot"


def options(name: str, about: str | None, *, first: bool = False) -> argparse.ArgumentParser:
    """What every application takes; ``first`` where settings can be looked for on other seeds than the table's, see :func:`seeds`."""
    made = parser(f"applications {name}", about)
    made.add_argument("--data", type=Path, default=DATA, help="folder with the data, default ~/.cache/khot")
    made.add_argument("--seeds", type=int, help="how many seeds or splits")
    if first:
        made.add_argument("--first", type=int, default=0, help="the first of them: 0 in the tables, 100 where settings are looked for")
    made.add_argument("--rows", help="comma separated rows of the table, default all")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--show", action="store_true", help="print the table of what has been run, and run nothing")
    return made


def seeds(given: argparse.Namespace, default: int) -> range:
    """Those that were asked for; settings are to be looked for with ``--out``, apart from the tables."""
    number = 1 if given.quick else given.seeds or default
    if given.first and given.out is None:
        raise SystemExit("with --first, name a file of its own: --out FILE; the table has the seeds from 0 on")
    return range(given.first, given.first + number)


def run(name: str, given: argparse.Namespace, cells: Sequence[dict[str, Any]], work: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the cells that are not in the file yet; ``work(**cell)`` gives what was measured."""
    torch.set_num_threads(given.threads)
    path = given.out or RESULTS / "applications" / (f"{name}-quick.jsonl" if given.quick else f"{name}.jsonl")
    record = Recorder(f"applications {name}", path, append=True)
    open_cells = [] if given.show else [cell for cell in cells if not any(_same(row, cell) for row in record.rows)]
    for cell in progress(open_cells, name):
        clock = Clock()
        measured = work(**cell)
        record.add(**cell, **(clock.seconds() | measured), threads=given.threads)
    return record.rows


class Clock:
    """Seconds since it was made: of the wall, and of this process on the processor, which other work on the machine hardly changes."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def seconds(self, name: str = "") -> dict[str, float]:
        return {f"{name}seconds": time.perf_counter() - self.wall, f"{name}cpu_seconds": time.process_time() - self.cpu}

    def step_ms(self, steps: int) -> dict[str, float]:
        """Milliseconds of one of so many steps."""
        wall, cpu = self.seconds().values()
        return {"step_ms": 1000 * wall / steps, "step_cpu_ms": 1000 * cpu / steps}


def _same(row: dict[str, Any], cell: dict[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in cell.items())


def mean(values: Iterable[float], digits: int = 3) -> str:
    """Mean and standard error."""
    found = list(values)
    if not found:
        return "-"
    error = f" ± {statistics.stdev(found) / len(found) ** 0.5:.{digits}f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.{digits}f}{error}"


def pivot(title: str, rows: Sequence[dict[str, Any]], down: str, across: str, value: str, *, digits: int = 3, note: str = "") -> Table:
    """A table of means: one line for each value of ``down``, one column for each of ``across``, and from how many runs each."""
    rows = [row for row in rows if value in row]
    lines, columns = (list(dict.fromkeys(row[key] for row in rows)) for key in (down, across))

    def cell(line: Any, column: Any) -> str:
        return mean((row[value] for row in rows if row[down] == line and row[across] == column), digits)

    def runs(line: Any) -> str:
        counts = [sum(row[down] == line and row[across] == column for row in rows) for column in columns]
        return ", ".join(str(number) for number in counts)

    body = [[line, *(cell(line, column) for column in columns), runs(line)] for line in lines]
    return Table(title, [down, *(f"{across} {column}" for column in columns), "runs"], body, note)
