"""Time per element against n: whether the cost grows linearly (``python -m bench speed --linear``)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import khot
from bench.common import Recorder, Table, draw_scores, laws_green, native_available, print_tables, progress, race, recorder
from bench.timing import gradient_of

FUNCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda x, k: torch.softmax(x, -1),
    "sigmoid": lambda x, k: khot.sigmoid_topk(x, k),
    "topk_mask": lambda x, k: khot.topk_mask(x, k),
    "soft_topk(hard=True)": lambda x, k: khot.soft_topk(x, k, hard=True),
    "sample_topk": lambda x, k: khot.sample_topk(x, k),
    "topk": lambda x, k: torch.topk(x, k).values,
}
HARD = ("topk_mask",)  # has no gradient


def run(options: argparse.Namespace) -> int:
    """One row of n scores, k = n/16, n = 10^2 .. 10^8 (10^6 with --quick), one thread."""
    torch.set_num_threads(1)
    laws_green("sigmoid")
    record = recorder("linear", options)
    sizes = [m * 10**p for p in range(2, 6 if options.quick else 8) for m in (1, 3)] + [10**6 if options.quick else 10**8]
    for n in progress(sizes, "linear"):
        _time(n, record, quick=options.quick)
    print_tables(tables(record.rows))
    return 0


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    found = {(row["n"], row["what"]): f"{row['nanoseconds']:.3g}" for row in rows if row["mode"] == "forward"}
    timed = [what for what in FUNCTIONS if any(what == name for _, name in found)]
    lines = [[f"{n:.0e}", *(found.get((n, what), "") for what in timed)] for n in dict.fromkeys(n for n, _ in found)]
    return [Table("nanoseconds per element, forward, float32, one thread, k = n/16", ["n", *timed], lines)]


def _time(n: int, record: Recorder, *, quick: bool) -> None:
    x, k = draw_scores("normal", (1, n)), max(1, n // 16)
    for mode in ("forward", "forward+backward"):
        calls = {name: _call(function, x, k, mode) for name, function in FUNCTIONS.items() if mode == "forward" or name not in HARD}
        least = 1 if n >= 10**8 else 3
        for name, timing in race(calls, seconds=0.1 if quick else 0.5, rounds=(least, 50)).items():
            kernels = "on" if native_available() else "off"
            row = {"what": name, "n": n, "k": k, "mode": mode, "kernels": kernels, "threads": 1, "dtype": "float32"}
            record.add(**row, **timing.row(), nanoseconds=1e9 * timing.median / n)


def _call(function: Callable[[Tensor, int], Tensor], x: Tensor, k: int, mode: str) -> Callable[[], object]:
    return (lambda: function(x, k)) if mode == "forward" else gradient_of(lambda leaf: function(leaf, k), x)
