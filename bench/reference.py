"""The threshold family in plain PyTorch, which GPUs without Triton and CPUs without a compiler run, beside torch.softmax."""

from __future__ import annotations

import math
from typing import Any

import torch

import khot
from bench.common import NATIVE, Recorder, Table, draw_scores, parser, print_tables, progress, race, recorder
from bench.timing import gradient_of
from khot import kernels

SHAPES = ((4096, 64, 2), (64, 1024, 32), (16, 16384, 1024), (1, 10**6, 62500))
BOUND = 12.0  # softmaxes, forward


def main(argv: list[str]) -> int:
    options = parser("reference", __doc__).parse_args(argv)
    record = recorder("reference", options)
    torch.set_num_threads(1)
    with kernels.disabled():
        for shape in progress(SHAPES[:2] if options.quick else SHAPES, "reference"):
            for mode in ("forward", "forward+backward"):
                _time(shape, mode, record, quick=options.quick)
    print_tables(tables(record.rows))
    return 0


def _time(shape: tuple[int, int, int], mode: str, record: Recorder, *, quick: bool) -> None:
    *size, k = shape
    x = draw_scores("normal", size)
    functions = {"softmax": lambda x: torch.softmax(x, -1)}
    functions |= {name: lambda x, method=khot.RELAXATIONS[name]: method.topk(x, k, 1.0) for name in NATIVE}
    calls = {name: (lambda f=f: f(x)) if mode == "forward" else gradient_of(f, x) for name, f in functions.items()}
    times = race(calls, seconds=0.04 if quick else 0.4)
    for name in NATIVE:
        bound = {"bound": BOUND} if mode == "forward" else {}
        timing = times[name].row()
        record.add(what=name, over="softmax", mode=mode, shape=_name(shape), **bound, **timing, ratio=times[name].ratio(times["softmax"]))


def _name(shape: tuple[int, int, int]) -> str:
    return str(shape).replace(" ", "").replace(str(10**6), "10^6")


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """One line a family and mode, one column a shape."""
    found = {(row["what"], row["mode"], row["shape"]): row["ratio"] for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    keys = dict.fromkeys((what, mode) for what, mode, _ in found)
    lines = [[what, mode, *(f"{found.get((what, mode, shape), math.nan):.1f}" for shape in shapes)] for what, mode in keys]
    return [Table("time over that of torch.softmax, plain PyTorch, float32, one thread", ["family", "mode", *shapes], lines)]
