"""Talking to a terminal: progress while it runs, a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

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


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table on standard output."""
    widths = [max(len(str(line[i])) for line in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}")
    for line in [head, ["-" * width for width in widths], *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
