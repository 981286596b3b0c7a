"""Sparse networks: the error of LeNet-300-100 on MNIST when 5, 2 or 1 % of its weights are left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from bench.applications.cells import Clock, mean, options, run, seeds
from bench.applications.data import images
from bench.common import Table, chosen, print_tables
from khot.nn import Sparsifier, anneal, sparsify

BATCH, VALIDATION = 100, 0.1  # rows in a step; the share of the training rows that is held out
EVERY = 8  # steps for which a mask is kept
# Test error in per cent at sparsity in per cent, as published (SNIP, Lee et al. 2019, table 1): printed, never mixed with our runs.
PUBLISHED = "SNIP 95.0: 1.6, 98.0: 2.4; dynamic network surgery 98.2: 2.0; LC 99.0: 3.2; sparse variational dropout 98.5: 1.9; dense 1.7"


def _plain_mask(scores: Tensor, k: Any, tau: float) -> Tensor:
    """The hard mask without any gradient: gradual magnitude pruning (Zhu & Gupta 2017)."""
    return khot.topk_mask(scores, k)


def _popup_mask(scores: Tensor, k: Any, tau: float) -> Tensor:
    """The hard mask with the gradient of the scores themselves (Ramanujan et al. 2020)."""
    return khot.straight_through(khot.topk_mask(scores, k), scores)


ROWS: dict[str, dict[str, Any]] = {
    "khot": {},
    "khot-kept": {"every": EVERY},
    "gradual-magnitude": {"method": _plain_mask},
    "euclidean": {"method": "euclidean"},
    "hard-soft-gradient": {"hard": True},
    "learned-scores": {"scores": "learned"},
    "edge-popup": {"scores": "learned", "method": _popup_mask, "scope": "layer", "until": 1.0},
    "snip": {},
    "dense": {},
}


def main(argv: list[str]) -> int:
    made = options("sparse", __doc__, first=True)
    made.add_argument("--epochs", type=int, default=20)
    made.add_argument("--densities", default="0.05,0.02,0.01")
    made.add_argument("--validate", action="store_true", help="leave the test images alone: for tuning")
    given = made.parse_args(argv)
    densities = [0.02] if given.quick else [float(part) for part in given.densities.split(",")]
    rows = chosen(given.rows, ROWS, ["khot", "dense"] if given.quick else None)
    tested = not given.validate
    epochs = 1 if given.quick else given.epochs
    cells = [
        {"data": "mnist", "row": row, "density": 1.0 if row == "dense" else density, "seed": seed, "epochs": epochs, "tested": tested}
        for seed in seeds(given, 5) for density in densities for row in rows if row != "dense" or density == densities[0]
    ]  # fmt: skip
    print_tables(tables(run("sparse", given, cells, functools.partial(_cell, folder=given.data))))
    return 0


def _cell(data: str, row: str, density: float, seed: int, epochs: int, tested: bool, folder: Path) -> dict[str, Any]:
    train, held = (torch.from_numpy(part) for part in images(data, "train", folder))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    cut = int(VALIDATION * len(train))
    fit, validation = order[cut:], order[:cut]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    train = (train - 0.1307) / 0.3081  # mean and deviation of the training pixels
    took = _train(model, row, density, train[fit], held[fit], epochs)
    found = {"validation_error": _error(model, train[validation], held[validation]), **took}
    if tested:
        x, y = (torch.from_numpy(part) for part in images(data, "t10k", folder))
        found["error"] = _error(model, (x - 0.1307) / 0.3081, y)
    kept = [int(layer.weight.count_nonzero()) for layer in model if isinstance(layer, nn.Linear)]
    return found | {"weights": sum(kept), "layers": kept}


def _train(model: nn.Module, row: str, density: float, x: Tensor, y: Tensor, epochs: int) -> dict[str, float]:
    """Train and leave plain layers; returns how long a step took."""
    keep, sparse = None, None
    if row == "snip":
        keep = _snip(model, x[:1000], y[:1000], density)
    elif row != "dense":
        sparse = sparsify(model, density, **ROWS[row])
        _start_scores(row, sparse)
    steps = epochs * (len(x) // BATCH)
    optimizer = torch.optim.SGD(_groups(model, row, sparse), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    clock = Clock()
    for step, rows in enumerate(rows for _ in range(epochs) for rows in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]):
        anneal(model, step / steps)
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if keep is not None:
            _multiply(model, keep)
    took = clock.step_ms(steps)
    if sparse is not None:
        anneal(model, 1.0)
        sparse.harden()
    return took


def _groups(model: nn.Module, row: str, sparse: Sparsifier | None) -> list[dict[str, Any]]:
    """Weight decay on weights only; scores ten times as fast; edge-popup leaves the weights as they were drawn."""
    scores = list(sparse.parameters()) if sparse is not None else []
    rest = [parameter for parameter in model.parameters() if all(parameter is not score for score in scores)]
    weights = [] if row == "edge-popup" else [parameter for parameter in rest if parameter.ndim > 1]
    biases = [parameter for parameter in rest if parameter.ndim == 1]
    groups = [{"params": weights, "weight_decay": 1e-4}, {"params": biases}, {"params": scores, "lr": 1.0}]
    return [group for group in groups if group["params"]]


def _start_scores(row: str, sparse: Sparsifier) -> None:
    """Scores of their own start at the magnitudes; edge-popup's at random."""
    for mask, module in zip(sparse.masks, sparse.modules, strict=True):
        if mask.scores is not None:
            weight = module.get_parameter("parametrizations.weight.original").detach()
            start = torch.rand_like(weight) * weight.abs().max() if row == "edge-popup" else weight.abs()
            mask.scores.data.copy_(start)


def _snip(model: nn.Module, x: Tensor, y: Tensor, density: float) -> list[Tensor]:
    """Connection sensitivity at the start, once: the largest |weight * gradient|."""
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), weights)
    saliency = torch.cat([(weight * grad).abs().flatten() for weight, grad in zip(weights, grads, strict=True)]).detach()
    flat = khot.topk_mask(saliency, round(density * saliency.numel()))
    keep = [part.view_as(weight) for part, weight in zip(flat.split([w.numel() for w in weights]), weights, strict=True)]
    _multiply(model, keep)
    return keep


@torch.no_grad()
def _multiply(model: nn.Module, keep: list[Tensor]) -> None:
    for layer, mask in zip((layer for layer in model.modules() if isinstance(layer, nn.Linear)), keep, strict=True):
        layer.weight.mul_(mask)


@torch.no_grad()
def _error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Wrong answers in per cent."""
    return 100 * float((model.eval()(x).argmax(-1) != y).float().mean())


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    densities = sorted({row["density"] for row in rows}, reverse=True)
    label: Callable[[float], str] = lambda density: f"{100 * density:g} %"  # noqa: E731
    made = []
    for value, title in (
        ("error", "test error, per cent"),
        ("validation_error", "validation error, per cent"),
        ("step_cpu_ms", "processor ms of a step"),
    ):
        body = [
            [name, *(mean((r[value] for r in rows if r["row"] == name and r["density"] == d and value in r), 2) for d in densities)]
            for name in dict.fromkeys(row["row"] for row in rows)
        ]  # fmt: skip
        note = f"Published, at sparsity: {PUBLISHED}." if value == "error" else ""
        made.append(Table(f"LeNet-300-100 on MNIST, {title}", ["row", *map(label, densities)], body, note))
    return made
