"""What is timed on what: shapes, counts, distributions, baselines, and the options that choose from them."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench.common import DTYPES, chosen, parser

SHAPES = {"1x1000000": (1, 10**6), "1x100000": (1, 10**5), "16x16384": (16, 16384), "256x32768": (256, 32768), "64x1024": (64, 1024)}
SHAPES["4096x64"] = (4096, 64)
COUNTS: dict[str, Callable[[int], int]] = {"n/16": lambda n: n // 16, "1": lambda n: 1, "8": lambda n: 8, "n/2": lambda n: n // 2}
DISTS = ("normal", "scale100", "cauchy", "ties")
MODES = ("forward", "forward+backward")
Function = Callable[[Tensor, int], Tensor]

BASELINES: dict[str, Function] = {
    "softmax": lambda x, k: torch.softmax(x, -1),
    "sigmoid()": lambda x, k: torch.sigmoid(x),
    "copy": lambda x, k: x.clone(),
    "topk": lambda x, k: torch.topk(x, k, dim=-1).values,
    "sort": lambda x, k: torch.sort(x, dim=-1).values,
}


@dataclass(frozen=True)
class Cell:
    """One input: everything that is timed on it is timed in one run."""

    shape: str
    count: str = "n/16"
    dist: str = "normal"
    dtype: str = "float32"
    threads: int = 1

    @property
    def unusual(self) -> int:
        """In how many ways the cell differs from the plain one: the plain ones come first."""
        plain = Cell(self.shape)
        return sum(mine != its for mine, its in zip(asdict(self).values(), asdict(plain).values(), strict=True))

    @property
    def k(self) -> int:
        return max(1, COUNTS[self.count](SHAPES[self.shape][1]))


def cells(options: argparse.Namespace) -> list[Cell]:
    """Plain cells first. The quick run keeps those that differ from the plain one in at most one way."""
    found = [
        Cell(shape, count, dist, dtype, int(threads))
        for shape in chosen(options.shapes, SHAPES)
        for count in chosen(options.counts, COUNTS)
        for dist in chosen(options.dists, DISTS)
        for dtype in chosen(options.dtypes, DTYPES, ("float32", "bfloat16", "float64"))
        for threads in chosen(options.threads, [str(i + 1) for i in range(os.cpu_count() or 1)], ("1", "2"))
    ]
    found.sort(key=lambda cell: (cell.unusual, math.prod(SHAPES[cell.shape])))  # the most expensive of a kind last
    asked = any((options.counts, options.dists, options.dtypes, options.threads))
    if not options.quick or asked:
        return found
    return [c for c in found if c.unusual == 0 or c.unusual == 1 and c.shape in ("1x100000", "4096x64")]


def options_parser(about: str | None) -> argparse.ArgumentParser:
    options = parser("speed", about)
    options.add_argument("--shapes", help=f"from {', '.join(SHAPES)}")
    options.add_argument("--counts", help=f"k, from {', '.join(COUNTS)}")
    options.add_argument("--dists", help=f"from {', '.join(DISTS)}")
    options.add_argument("--dtypes", help=f"from {', '.join(DTYPES)}")
    options.add_argument("--threads", help="from 1, 2, ...")
    options.add_argument("--kernels", choices=("both", "on", "off"), default="both", help="native code, the reference, or both in turn")
    options.add_argument("--peers", action="store_true", help="other people's implementations too, where they are installed")
    options.add_argument("--linear", action="store_true", help="instead: time per element from n = 10^2 to 10^8")
    options.add_argument("--verbs", action="store_true", help="instead: hard, gathered and sampled selection, as `python -m bench verbs`")
    options.add_argument("--minutes", type=float, help="time for one setting of the kernels; what is left then gets a row that says so")
    options.add_argument("--limit", type=float, help="seconds a call may take, else it is skipped there (2 on plain cells, else 0.25)")
    options.add_argument("--gigabytes", type=float, default=8.0, help="memory that may be used")
    options.add_argument("--silent", action="store_true", help=argparse.SUPPRESS)
    return options
