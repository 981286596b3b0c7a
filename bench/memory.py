"""Peak memory beyond input and output, and what is kept for backward, of every relaxation."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import (
    NATIVE,
    THRESHOLD,
    Recorder,
    Table,
    affordable,
    chosen,
    draw_scores,
    green,
    native_available,
    parser,
    print_tables,
    progress,
    recorder,
    same,
)
from bench.timing import memory_limit

SHAPES = {"1x1000000": (1, 10**6), "16x65536": (16, 65536), "256x32768": (256, 32768)}
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
BASELINES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda x, k: torch.softmax(x, -1),
    "topk": lambda x, k: torch.topk(x, k, dim=-1).values,
    "sort": lambda x, k: torch.sort(x, dim=-1).values,
}


def main(argv: list[str]) -> int:
    options = _options().parse_args(argv)
    if not RESET.exists():
        raise SystemExit("the peak of the resident memory can be read and reset on Linux only")
    if options.kernels == "both":
        return _both(argv, options)
    torch.set_num_threads(1)
    record = recorder("memory", options)
    with memory_limit(options.gigabytes):
        _run(options, record)
    return 0


def _options() -> argparse.ArgumentParser:
    options = parser("memory", __doc__)
    options.add_argument("--shapes", help=f"from {', '.join(SHAPES)}")
    options.add_argument("--kernels", choices=("both", "on", "off"), default="both")
    options.add_argument("--limit", type=float, help="seconds a call may take, else the method is skipped (1; 0.25 with --quick)")
    options.add_argument("--gigabytes", type=float, default=8.0, help="memory that may be used")
    return options


def _both(argv: list[str], options: argparse.Namespace) -> int:
    """Measure in processes that give freed memory back at once, with the native code and without."""
    record = recorder("memory", options)
    settings = ["on", "off"] if native_available() else ["off"]
    for setting in settings:
        # glibc keeps freed blocks below this size for later, which would hide them from the peak
        env = {
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "KHOT_KERNELS": str(int(setting == "on")),
        }
        names = [m for m in _methods(options) if m in NATIVE or setting == settings[0]]
        command = [sys.executable, "-m", "bench", "memory", *argv, "--append", "--out", str(record.path), "--kernels", setting]
        subprocess.run([*command, "--methods", ",".join(names)], env=env, check=True)
    print_tables(tables(Recorder("memory", record.path, append=True).rows))
    return 0


def _methods(options: argparse.Namespace) -> list[str]:
    import khot

    return chosen(options.methods, khot.RELAXATIONS, THRESHOLD if options.quick else None)


def _run(options: argparse.Namespace, record: Recorder) -> None:
    import khot

    functions = {**BASELINES, **{name: khot.RELAXATIONS[name].topk for name in green(_methods(options), record)}}
    shapes = chosen(options.shapes, SHAPES, ("1x1000000",) if options.quick else None)
    cases = [(shape, name) for shape in shapes for name in functions]
    limit = options.limit or (0.25 if options.quick else 1.0)
    sure = {*BASELINES, "sigmoid", *(NATIVE if native_available() else ())}
    for shape, name in progress(cases, "memory"):
        row = _case(functions[name], SHAPES[shape], limit, expensive=name not in sure)
        kernels = "on" if native_available() else "off"
        record.add(what=name, shape=shape, kernels=kernels, **row)


def _case(function: Callable[[Tensor, int], Tensor], shape: tuple[int, int], limit: float, *, expensive: bool) -> dict[str, Any]:
    """Bytes, and the same as multiples of the input."""
    batch, n = shape
    if expensive and (reason := affordable(lambda b, m: function(draw_scores("normal", (b, m)), max(1, m // 16)), batch, n, limit=limit)):
        return {"skipped": reason}
    x, k = draw_scores("normal", shape), n // 16
    _warm(function)
    size = x.nbytes
    found = {"forward_peak": peak(lambda: function(x, k)), "backward_peak": _backward_peak(function, x, k), "saved": saved(function, x, k)}
    return {"n": n, "batch": batch, "k": k, "input": size, **found, **{f"{name}_ratio": value / size for name, value in found.items()}}


def _warm(function: Callable[[Tensor, int], Tensor]) -> None:
    """Load what is loaded at the first call."""
    leaf = torch.randn(2, 64, requires_grad=True)
    function(leaf, 4).sum().backward()


def _backward_peak(function: Callable[[Tensor, int], Tensor], x: Tensor, k: int) -> int:
    leaf = x.clone().requires_grad_()

    def both() -> Tensor:
        out = function(leaf, k)
        return torch.autograd.grad(out, leaf, torch.ones((), dtype=out.dtype).expand_as(out))[0]

    return peak(both)


def peak(call: Callable[[], Tensor]) -> int:
    """Bytes by which the resident memory of the process rose during the call, less those of its result.

    It sees every allocation that is touched, torch's and native code's alike, to the size of a page. The least of three calls counts,
    because the first also loads code.
    """
    return min(_rise(call) for _ in range(3))


def _rise(call: Callable[[], Tensor]) -> int:
    gc.collect()
    RESET.write_text("5")  # the peak is counted anew from here
    before = _status("VmRSS")
    result = call()
    return max(0, _status("VmHWM") - before - result.untyped_storage().nbytes())


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def saved(function: Callable[[Tensor, int], Tensor], x: Tensor, k: int) -> int:
    """Bytes of the different storages, other than the input's, that autograd keeps for backward."""
    leaf = x.clone().requires_grad_()
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(leaf, k)
    storages.pop(leaf.untyped_storage().data_ptr(), None)
    del out
    return sum(storages.values())


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Multiples of the input's size, a table for each shape."""
    return [_table(rows, shape) for shape in dict.fromkeys(row["shape"] for row in rows if "shape" in row)]


def _table(rows: list[dict[str, Any]], shape: str) -> Table:
    keys = ("forward_peak_ratio", "backward_peak_ratio", "saved_ratio")
    native = any(same(row, kernels="on") for row in rows)
    here = [row for row in rows if same(row, shape=shape) and (row["kernels"] == "on" or row["what"] in NATIVE or not native)]
    lines = [[_name(row), *(f"{row[key]:.3f}" if key in row else "skipped" for key in keys)] for row in here]
    head = ["", "forward, beyond input and output", "forward + backward, beyond input and gradient", "kept for backward"]
    return Table(f"memory at {shape}, float32, k = n/16, as multiples of the input", head, lines)


def _name(row: dict[str, Any]) -> str:
    return f"{row['what']} ({'native' if row['kernels'] == 'on' else 'reference'})" if row["what"] in NATIVE else row["what"]
