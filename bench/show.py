"""Talking to a terminal: progress while it runs, a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


def progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Iterate with a bar on a terminal, with a line every 20 seconds elsewhere."""
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm

            yield from tqdm(items, desc=label, dynamic_ncols=True)
            return
        except ImportError:
            pass
    began = last = time.monotonic()
    for done, item in enumerate(items):
        yield item
        if (now := time.monotonic()) - last > 20:
            sys.stderr.write(f"{label}: {done + 1}/{len(items)}, {now - began:.0f} s\n")
            last = now


class Table(NamedTuple):
    """What a benchmark has to say, for a terminal or a page."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""

    def text(self) -> str:
        """Plain text with aligned columns."""
        lines = [[str(cell) for cell in line] for line in (self.head, *self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        lines.insert(1, ["-" * width for width in widths])
        body = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join(["", self.title, *body, *([self.note] if self.note else [])])

    def markdown(self) -> str:
        lines = [[str(cell).replace("|", "\\|") for cell in line] for line in (self.head, ["---"] * len(self.head), *self.rows)]
        body = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([f"**{self.title[0].upper()}{self.title[1:]}**", "", *body, *(["", self.note] if self.note else [])])


def print_tables(tables: Iterable[Table]) -> None:
    for table in tables:
        print(table.text())
