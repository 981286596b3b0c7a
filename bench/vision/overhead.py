"""What a step of `khot train` costs beside a bare loop of the same model, optimiser and data."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bench.common import RESULTS, Recorder, Table, parser, print_tables
from khot.models import create_model
from khot.train.batches import Batches, StepSampler
from khot.train.config import TrainConfig
from khot.train.engine import Run, decay_groups, drive


def main(argv: list[str]) -> int:
    options = parser("vision overhead", __doc__)
    options.add_argument("--steps", type=int, default=15)
    options.add_argument("--rounds", type=int, default=7)
    given = options.parse_args(argv)
    torch.set_num_threads(1)
    steps, rounds = (2, 2) if given.quick else (given.steps, given.rounds)
    default = RESULTS / "vision" / ("overhead-quick.jsonl" if given.quick else "overhead.jsonl")
    with tempfile.TemporaryDirectory() as folder:
        row = measure(Path(folder), steps, rounds, batch_size=8 if given.quick else 128)
    record = Recorder("vision overhead", given.out or default, append=given.append)
    record.add(**row)
    print_tables(tables(record.rows))
    return 0


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    lines = [
        [
            f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})",
            f"{1e3 * row['step_seconds']:.0f} ms",
            f"{1e3 * row['checkpoint_seconds']:.0f} ms",
            f"{100 * row['checkpoint_share_of_200_steps']:.2f} %",
            f"{100 * row['loading_share']:.1f} %",
        ]
        for row in rows
    ]
    head = ["engine over a bare loop", "step of the bare loop", "checkpoint", "a checkpoint every 200 steps", "data loading"]
    return [Table(f"{rows[0]['model']}, batch {rows[0]['batch']}", head, lines)]


def measure(folder: Path, steps: int, rounds: int, batch_size: int) -> dict[str, Any]:
    """Both loops in turns; the engine with its schedule, log, events and one checkpoint at the end."""
    write_noise(folder, steps * batch_size)
    ratios, seconds, saves, loading = [], [], [], []
    for turn in range(rounds):
        run = Run(TrainConfig(data="mnist", data_dir=folder, out=folder / str(turn), validation=0, epochs=1, batch_size=batch_size, pad=0))
        run.config.progress = False
        run.config.out.mkdir()
        calls = {"engine": lambda run=run: drive(run), "bare": lambda run=run: bare_loop(run)}
        took = {name: timed(calls[name]) for name in (("engine", "bare"), ("bare", "engine"))[turn % 2]}
        ratios.append(took["engine"] / took["bare"])
        seconds.append(took["bare"] / steps)
        saves.append(timed(run.save))
        run.step = 0  # the loader begins where the run is
        loading.append(timed(lambda run=run: list(run.loader())) / steps)
    step, save = statistics.median(seconds), statistics.median(saves)
    return {
        "what": "overhead",
        "ratio": statistics.median(ratios),  # with one checkpoint in `steps` steps
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "step_seconds": step,
        "checkpoint_seconds": save,
        "checkpoint_share_of_200_steps": save / (200 * step),
        "loading_share": statistics.median(loading) / step,
        "steps": steps,
        "rounds": rounds,
        "batch": batch_size,
        "model": "vit, tiny: dim 96, depth 6, 28 x 28",
    }


def bare_loop(run: Run) -> None:
    """What one would write by hand."""
    model = create_model("vit", preset="tiny").train()
    optimizer = torch.optim.AdamW(decay_groups(model, 0.05), lr=1e-3)
    data = Batches(run.source, seed=0, flip=True)
    sampler = StepSampler(run.subset, run.config.batch_size, 1, seed=0)
    for images, labels, _ in DataLoader(data, batch_size=None, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write_noise(folder: Path, n: int) -> None:
    """MNIST's files with random pixels."""
    for part in ("train", "t10k"):
        for kind, values in (("images-idx3", torch.randint(0, 256, (n, 28, 28))), ("labels-idx1", torch.arange(n) % 10)):
            (folder / f"{part}-{kind}-ubyte").write_bytes(_header(values) + values.to(torch.uint8).numpy().tobytes())


def _header(values: Tensor) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
