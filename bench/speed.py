"""Forward and forward + backward of every relaxation against torch.softmax, sigmoid, topk, sort and a copy."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bench import linear, verbs
from bench.common import (
    DTYPES,
    NATIVE,
    THRESHOLD,
    Recorder,
    affordable,
    chosen,
    draw_scores,
    green,
    native_available,
    print_tables,
    progress,
    race,
    recorder,
)
from bench.peers import peers
from bench.speed_cells import BASELINES, COUNTS, MODES, SHAPES, Cell, Function, cells, options_parser
from bench.speed_report import tables
from bench.timing import gradient_of, memory_limit


def main(argv: list[str]) -> int:
    options = options_parser(__doc__).parse_args(argv)
    if options.linear:
        return linear.run(options)
    if options.verbs:
        given = [word for word in argv if word != "--verbs"]
        return verbs.main(given)
    if options.kernels == "both":
        return _both(argv, options)
    record = recorder("speed", options)
    with memory_limit(options.gigabytes):
        _run(options, record)
    if not options.silent:
        print_tables(tables(record.rows))
    return 0


def _run(options: argparse.Namespace, record: Recorder) -> None:
    """First what has native code, over all cells; then, with as much time again, the others and the peers."""
    methods = green(_methods(options), record)
    native = [name for name in methods if name in NATIVE]
    _run_group(native, {}, options, record)
    rest, others = [name for name in methods if name not in NATIVE], _peers(options, record)
    if rest or others:
        _run_group(rest, others, options, record)


def _run_group(methods: list[str], others: dict[str, Function], options: argparse.Namespace, record: Recorder) -> None:
    deadline = time.monotonic() + 30 * (options.minutes or (0.8 if options.quick else 15))
    for cell in progress(cells(options), f"speed, kernels {_kernels()}, {len(methods) + len(others)} methods"):
        if time.monotonic() > deadline:
            _skip_cell(cell, [*methods, *others], record)
        else:
            _time_cell(cell, methods, others, options, record)


def _both(argv: list[str], options: argparse.Namespace) -> int:
    """One process with the native code, if it is there, and one with the reference, for the family that has both."""
    record = recorder("speed", options)
    settings = ["on", "off"] if native_available() else ["off"]
    for setting in settings:
        first = setting == settings[0]
        names = [name for name in _methods(options) if first or name in NATIVE]
        given = [word for word in argv if first or word != "--peers"]
        command = [sys.executable, "-m", "bench", "speed", *given, "--append", "--silent", "--out", str(record.path), "--kernels", setting]
        env = {**os.environ, "KHOT_KERNELS": "1" if setting == "on" else "0"}
        subprocess.run([*command, "--methods", ",".join(names)], env=env, check=True)
    print_tables(tables(Recorder("speed", record.path, append=True).rows))
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


def _time_cell(cell: Cell, methods: list[str], others: dict[str, Function], options: argparse.Namespace, record: Recorder) -> None:
    torch.set_num_threads(cell.threads)
    x = draw_scores(cell.dist, SHAPES[cell.shape], DTYPES[cell.dtype], options.seed)
    kinds = dict.fromkeys(BASELINES, "baseline") | dict.fromkeys(methods, "method") | dict.fromkeys(others, "peer")
    first = all(name in NATIVE for name in kinds.keys() - BASELINES.keys())  # the second group needs nothing but softmax again
    functions: dict[str, Function] = dict(BASELINES) if first else {"softmax": BASELINES["softmax"]}
    limit = options.limit or (0.25 if options.quick else 2.0 if cell.unusual == 0 else 0.25)
    for name, function in {**{name: _method(name) for name in methods}, **others}.items():
        if (reason := _too_expensive(name, function, cell.shape, cell.count, limit)) is None:
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
            if first or name not in BASELINES:
                record.add(**_row(cell, name, kinds[name]), mode=mode, **timing.row(), ratio=timing.ratio(times["softmax"]))


@functools.cache
def _method(name: str) -> Function:
    """What users call."""
    import khot

    return functools.partial(khot.soft_topk, method=name)


def _call(function: Function, x: Tensor, k: int, mode: str) -> Callable[[], object]:
    if mode == "forward":
        return lambda: function(x, k)
    call = gradient_of(lambda leaf: function(leaf, k), x)
    call()
    return call


@functools.cache
def _too_expensive(name: str, function: Function, shape: str, count: str, limit: float) -> str | None:
    """On plain scores: the others do not cost so much more that a bound is broken by it."""
    if name == "sigmoid" or name in NATIVE and native_available():
        return None

    def call(batch: int, n: int) -> Tensor:
        return function(draw_scores("normal", (batch, n)), min(n, max(1, COUNTS[count](n))))

    return affordable(call, *SHAPES[shape], limit=limit)


def _row(cell: Cell, name: str, kind: str) -> dict[str, Any]:
    batch, n = SHAPES[cell.shape]
    return {"what": name, "kind": kind, **asdict(cell), "batch": batch, "n": n, "k": cell.k, "kernels": _kernels()}


def _skip_cell(cell: Cell, names: list[str], record: Recorder) -> None:
    record.add(**_row(cell, ", ".join(names), "several"), skipped="the time given was used up")
