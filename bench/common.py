"""What the benchmarks share: the facts in every row, data files, options, progress, score distributions.

Timing lives in :mod:`bench.timing` and the gate for broken methods in :mod:`bench.gate`; both are handed on from here.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gate import LawsRed as LawsRed
from bench.gate import laws_green as laws_green
from bench.show import Table as Table
from bench.show import print_tables as print_tables
from bench.show import progress as progress
from bench.timing import Timing as Timing
from bench.timing import affordable as affordable
from bench.timing import race as race
from khot import RELAXATIONS
from khot.kernels.library import instruction_set

RESULTS = Path(__file__).parent / "results"
NATIVE = ("sigmoid", "euclidean", "laplace", "gaussian")  # the methods whose bounds are those of the native solver
THRESHOLD = tuple(name for name, row in RELAXATIONS.items() if row.family)  # all that one solver serves
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}


@functools.cache
def facts() -> dict[str, Any]:
    """Machine, versions and commit: what a number means nothing without."""
    import khot

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "kernel": instruction_set(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "khot": khot.__version__,
        "native": native_available(),
        "commit": _commit(),
    }


def native_available() -> bool:
    """Whether the compiled kernels are there and switched on."""
    try:
        from khot import kernels
    except ImportError:
        return False
    there = getattr(kernels, "available", bool)
    return kernels.enabled() and bool(there())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../src", "*.py")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Recorder:
    """Writes rows as JSON lines, each with the facts, as they come: what was measured before a crash is kept."""

    def __init__(self, bench: str, path: Path, *, append: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.bench, self.path, self.rows = bench, path, [json.loads(line) for line in _lines(path)] if append else []
        self._file = path.open("a" if append else "w")

    def add(self, **row: Any) -> dict[str, Any]:
        """Write one row. Numbers are kept to 5 digits."""
        load = {"load": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
        full = {"bench": self.bench, **{key: _short(value) for key, value in row.items()}, **facts(), **load}
        self._file.write(json.dumps(full) + "\n")
        self._file.flush()
        self.rows.append(full)
        return full


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def load(bench: str, path: Path | None = None) -> list[dict[str, Any]]:
    """The rows of a benchmark: of the full run if there is one, else of the quick one, else none."""
    for candidate in [path] if path else [RESULTS / f"{bench}.jsonl", RESULTS / f"{bench}-quick.jsonl"]:
        if rows := [json.loads(line) for line in _lines(candidate)]:
            return rows
    return []


def parser(bench: str, about: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(prog=f"python -m bench {bench}", description=about)
    options.add_argument("--quick", action="store_true", help="a small part, in minutes")
    options.add_argument("--out", type=Path, help=f"data file, default bench/results/{bench}.jsonl ({bench}-quick.jsonl with --quick)")
    options.add_argument("--append", action="store_true", help="add to the data file instead of replacing it")
    options.add_argument("--methods", help="comma separated names from the registry")
    options.add_argument("--seed", type=int, default=0)
    return options


def recorder(bench: str, options: argparse.Namespace) -> Recorder:
    default = RESULTS / (f"{bench}-quick.jsonl" if options.quick else f"{bench}.jsonl")
    return Recorder(bench, options.out or default, append=options.append)


def chosen(given: str | None, table: Iterable[str], default: Sequence[str] | None = None) -> list[str]:
    """Names from a comma separated option; an unknown one is an error that lists the choices."""
    known = list(table)
    if given is None:
        return [name for name in default if name in known] if default is not None else known
    names = [name.strip() for name in given.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"unknown {', '.join(unknown)}; choose from {', '.join(known)}")
    return names


def green(methods: Iterable[str], record: Recorder) -> list[str]:
    """The methods whose laws hold; every other gets a row that says why it is not reported."""
    kept = []
    for method in methods:
        try:
            laws_green(method)
            kept.append(method)
        except LawsRed as error:
            record.add(what=method, refused=str(error))
            sys.stderr.write(f"refused: {error}\n")
    return kept


def draw_scores(dist: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Scores of a named distribution: ``normal``, ``scale100``, ``cauchy`` or ``ties`` (about 20 different values)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if dist == "scale100":
        x *= 100
    elif dist == "cauchy":
        x /= torch.randn(*shape, generator=generator)
    elif dist == "ties":
        x = x.mul_(2).round_().div_(2)
    elif dist != "normal":
        raise ValueError(f"unknown distribution {dist!r}; choose from normal, scale100, cauchy, ties")
    return x.to(dtype)


def same(row: Mapping[str, Any], **values: Any) -> bool:
    """Whether a row has these values."""
    return all(row.get(key) == value for key, value in values.items())
