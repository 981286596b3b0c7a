"""``khot demo``: learn by gradient which k of 64 pixels to look at, and compare with other ways to choose them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from khot.demo import data, picture
from khot.demo.training import METHODS, train

NAMES = {  # in the table, and in the picture
    "learned": ("learned (khot)", "khot: learned through a soft top-k"),
    "hard": ("hard top-k", "same training, hard top-k"),
    "information": ("mutual information", "mutual information"),
    "variance": ("highest variance", "highest variance"),
    "random": ("random pixels", "random pixels"),
}

_NARROW: dict[str, Any] = {"box": None, "padding": (0, 1, 0, 0), "pad_edge": False}  # six columns in 80 characters


def run(ks: Sequence[int], seeds: int, steps: int, method: str, out: Path) -> int:
    """Train, print the table, save the picture; returns the exit code."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    _check(ks, seeds, steps)
    torch.set_num_threads(1)  # the matrices are small: on two cores a second thread took longer, and much longer beside other work
    console, start = Console(), time.perf_counter()
    split = data.load(seeds)
    count = len(METHODS) * len(ks) * seeds
    console.print(f"{count} networks: {len(METHODS)} ways to choose k of 64 pixels x {len(ks)} k x {seeds} seeds, {steps} steps each.")
    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps)
        result = train(split, ks, steps, method, lambda: progress.advance(task))
    console.print(_table(result.accuracy, ks))
    picture.draw(result, split, ks, {method: name for method, (_, name) in NAMES.items()}, out)
    console.print(f"picture: {out}   ({time.perf_counter() - start:.0f} s)", highlight=False)
    return 0


def _check(ks: Sequence[int], seeds: int, steps: int) -> None:
    if not all(1 <= k <= data.NUM_PIXELS for k in ks):
        raise SystemExit(f"khot demo: --k must be between 1 and {data.NUM_PIXELS}, got {' '.join(map(str, ks))}")
    if seeds < 1 or steps < 2:
        raise SystemExit(f"khot demo: --seeds must be at least 1 and --steps at least 2, got {seeds} and {steps}")


def _table(accuracy: Tensor, ks: Sequence[int]) -> object:
    """Mean and standard deviation over the seeds, in per cent; the best of each column in bold."""
    from rich.table import Table

    mean, spread = 100 * accuracy.mean(0), 100 * accuracy.std(0, correction=min(1, len(accuracy) - 1))
    table = Table(title="test accuracy in %, mean±standard deviation over seeds", title_justify="left", **_NARROW)
    for name in ("pixels by", *(f"k={k}" for k in ks)):
        table.add_column(name, justify="left" if name.startswith("pixels") else "right", no_wrap=True)
    best = mean.argmax(0)
    for i, method in enumerate(METHODS):
        cells = [f"{mean[i, j]:.1f}±{spread[i, j]:.1f}" for j in range(len(ks))]
        table.add_row(NAMES[method][0], *(f"[bold]{cell}[/]" if best[j] == i else cell for j, cell in enumerate(cells)))
    return table
