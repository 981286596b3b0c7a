"""Forward and forward + backward of every relaxation against torch.softmax, sigmoid, topk, sort and a copy."""

from __future__ import annotations

import argparse
import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench import linear
from bench.common import (
    DTYPES,
    THRESHOLD,
    Recorder,
    affordable,
    chosen,
    draw_scores,
    green,
    native_available,
    parser,
    print_table,
    progress,
    race,
    recorder,
    same,
)
from bench.peers import peers
from bench.timing import gradient_of, memory_limit

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


def main(argv: list[str]) -> int:
    options = _options().parse_args(argv)
    if options.linear:
        return linear.run(options)
    if options.kernels == "both":
        return _both(argv, options)
    record = recorder("speed", options)
    with memory_limit(options.gigabytes):
        _run(options, record)
    if not options.silent:
        report(record.rows)
    return 0


def _run(options: argparse.Namespace, record: Recorder) -> None:
    methods = green(_methods(options), record)
    others = _peers(options, record)
    deadline = time.monotonic() + 60 * (options.minutes or (0.8 if options.quick else 15))
    for cell in progress(_cells(options), f"speed, kernels {_kernels()}"):
        if time.monotonic() > deadline:
            _skip_cell(cell, methods, record)
        else:
            _time_cell(cell, methods, others, options, record)


def _options() -> argparse.ArgumentParser:
    options = parser("speed", __doc__)
    options.add_argument("--shapes", help=f"from {', '.join(SHAPES)}")
    options.add_argument("--counts", help=f"k, from {', '.join(COUNTS)}")
    options.add_argument("--dists", help=f"from {', '.join(DISTS)}")
    options.add_argument("--dtypes", help=f"from {', '.join(DTYPES)}")
    options.add_argument("--threads", help="from 1, 2, ...")
    options.add_argument("--kernels", choices=("both", "on", "off"), default="both", help="native code, the reference, or both in turn")
    options.add_argument("--peers", action="store_true", help="other people's implementations too, where they are installed")
    options.add_argument("--linear", action="store_true", help="instead: time per element from n = 10^2 to 10^8")
    options.add_argument("--minutes", type=float, help="time for one setting of the kernels; what is left then gets a row that says so")
    options.add_argument("--limit", type=float, help="seconds a call may take, else the method is skipped there (0.5; 0.25 with --quick)")
    options.add_argument("--gigabytes", type=float, default=8.0, help="memory that may be used")
    options.add_argument("--silent", action="store_true", help=argparse.SUPPRESS)
    return options


def _both(argv: list[str], options: argparse.Namespace) -> int:
    """One process with the native code, if it is there, and one with the reference, for the family that has both."""
    record = recorder("speed", options)
    common = [sys.executable, "-m", "bench", "speed", *argv, "--append", "--silent", "--out", str(record.path)]
    settings = ["on", "off"] if native_available() else ["off"]
    for setting in settings:
        extra = ["--methods", ",".join(m for m in _methods(options) if m in THRESHOLD)] if setting == "off" and len(settings) > 1 else []
        env = {**os.environ, "KHOT_KERNELS": "1" if setting == "on" else "0"}
        subprocess.run([*common, "--kernels", setting, *extra], env=env, check=True)
    report(Recorder("speed", record.path, append=True).rows)
    return 0


def _methods(options: argparse.Namespace) -> list[str]:
    import khot

    return chosen(options.methods, khot.RELAXATIONS, THRESHOLD if options.quick else None)


def _peers(options: argparse.Namespace, record: Recorder) -> dict[str, Function]:
    if not options.peers:
        return {}
    found, missing = peers()
    for name, reason in missing.items():
        record.add(what=name, kind="peer", skipped=f"not installed: {reason}")
        sys.stderr.write(f"not installed: {reason}\n")
    return found


def _kernels() -> str:
    return "on" if native_available() else "off"


def _cells(options: argparse.Namespace) -> list[Cell]:
    """Plain cells first. The quick run keeps those that differ from the plain one in at most one way."""
    cells = [
        Cell(shape, count, dist, dtype, int(threads))
        for shape in chosen(options.shapes, SHAPES)
        for count in chosen(options.counts, COUNTS)
        for dist in chosen(options.dists, DISTS)
        for dtype in chosen(options.dtypes, DTYPES, ("float32", "bfloat16", "float64"))
        for threads in chosen(options.threads, [str(i + 1) for i in range(os.cpu_count() or 1)], ("1", "2"))
    ]
    cells.sort(key=lambda cell: (cell.unusual, math.prod(SHAPES[cell.shape])))  # the dearest of a kind last
    asked = any((options.counts, options.dists, options.dtypes, options.threads))
    if not options.quick or asked:
        return cells
    return [c for c in cells if c.unusual == 0 or c.unusual == 1 and c.shape in ("1x100000", "4096x64")]


def _time_cell(cell: Cell, methods: list[str], others: dict[str, Function], options: argparse.Namespace, record: Recorder) -> None:
    import khot

    torch.set_num_threads(cell.threads)
    x = draw_scores(cell.dist, SHAPES[cell.shape], DTYPES[cell.dtype], options.seed)
    kinds = dict.fromkeys(BASELINES, "baseline") | dict.fromkeys(methods, "method") | dict.fromkeys(others, "peer")
    functions: dict[str, Function] = dict(BASELINES)
    limit = options.limit or (0.25 if options.quick else 0.5)
    for name, function in {**{m: khot.RELAXATIONS[m].topk for m in methods}, **others}.items():
        if (reason := _too_dear(name, function, cell, limit)) is None:
            functions[name] = function
        else:
            record.add(**_row(cell, name, kinds[name]), skipped=reason)
    for mode in MODES:
        calls = {}
        for name, function in functions.items():
            try:
                calls[name] = _call(function, x, cell.k, mode)
            except (RuntimeError, TypeError) as error:
                record.add(**_row(cell, name, kinds[name]), mode=mode, skipped=f"fails: {str(error).splitlines()[0][:160]}")
        times = race(calls, **({"seconds": 0.04, "rounds": (3, 30), "patience": 0.4} if options.quick else {"seconds": 0.1}))
        for name, timing in times.items():
            record.add(**_row(cell, name, kinds[name]), mode=mode, **timing.row(), ratio=timing.ratio(times["softmax"]))


def _call(function: Function, x: Tensor, k: int, mode: str) -> Callable[[], object]:
    if mode == "forward":
        return lambda: function(x, k)
    call = gradient_of(lambda leaf: function(leaf, k), x)
    call()
    return call


@functools.cache
def _too_dear(name: str, function: Function, cell: Cell, limit: float) -> str | None:
    if name == "sigmoid":
        return None

    def call(batch: int, n: int) -> Tensor:
        k = max(1, COUNTS[cell.count](n))
        return function(draw_scores(cell.dist, (batch, n), DTYPES[cell.dtype]), min(k, n))

    return affordable(call, *SHAPES[cell.shape], limit=limit)


def _row(cell: Cell, name: str, kind: str) -> dict[str, Any]:
    batch, n = SHAPES[cell.shape]
    return {"what": name, "kind": kind, **asdict(cell), "batch": batch, "n": n, "k": cell.k, "kernels": _kernels()}


def _skip_cell(cell: Cell, methods: list[str], record: Recorder) -> None:
    for name in methods:
        record.add(**_row(cell, name, "method"), skipped="the time given was used up")


def report(rows: list[dict[str, Any]]) -> None:
    """Ratio to softmax, forward / forward + backward, on the plain cells."""
    plain = [row for row in rows if same(row, count="n/16", dist="normal", dtype="float32", threads=1)]
    names = list(dict.fromkeys((row["what"], row["kind"], row["kernels"]) for row in plain))
    native = any(kernels == "on" for _, _, kernels in names)
    lines = []
    for what, kind, kernels in names:
        if kernels == "off" and kind != "method" and native:
            continue
        mine = [row for row in plain if same(row, what=what, kernels=kernels)]
        cells = [_ratio(mine, shape) for shape in SHAPES]
        lines.append([f"{what} ({'native' if kernels == 'on' else 'reference'})" if what in THRESHOLD else what, *cells])
    print_table("ratio to torch.softmax, forward / forward + backward; k = n/16, normal scores, float32, 1 thread", ["", *SHAPES], lines)
    skipped = sum("skipped" in row for row in rows)
    print(f"{len(rows)} rows, {skipped} of them say why something was not timed; every ratio is against softmax in the same run")


def _ratio(rows: list[dict[str, Any]], shape: str) -> str:
    here = [row for row in rows if row["shape"] == shape]
    if any("skipped" in row and "mode" not in row for row in here):
        return "skipped"
    found = {row["mode"]: f"{row['ratio']:.2g}" if row["ratio"] < 10 else f"{row['ratio']:.0f}" for row in here if "ratio" in row}
    return " / ".join(found.get(mode, "-") for mode in MODES) if found else ""
