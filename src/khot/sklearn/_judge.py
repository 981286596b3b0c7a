"""Learning which features to keep: a network behind a :class:`khot.nn.FeatureSelector`, trained in one loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from khot.nn import FeatureSelector, anneal

NUM_CHECKS = 20  # how often it is asked whether the choice still changes


@dataclass(frozen=True)
class Task:
    """What the network behind the mask has to say, and how wrong it is."""

    target: Tensor
    outputs: int
    loss: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Budget:
    """How long, how fast and how carefully to learn."""

    steps: int
    batch_size: int
    rate: float
    score_rate: float
    patience: int | None
    bar: Callable[[range], Iterator[int]]


def standardised(x: np.ndarray) -> Tensor:
    """Columns with mean 0 and deviation 1 in float32; a constant column is 0."""
    return scaled(x, *scale_of(x))


def scale_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of every column; the deviation of a constant column is infinite."""
    x = np.asarray(x, dtype=np.float64)
    unit = np.abs(x).max(axis=0, initial=0.0)
    unit = np.where(unit > 0, unit, 1.0)
    x = x / unit  # huge values would overflow when squared
    centre, deviation = x.mean(axis=0), (x - x.mean(axis=0)).std(axis=0)
    tiny = deviation <= 4 * np.finfo(np.float64).eps * np.abs(x).max(axis=0, initial=0.0)
    return centre * unit, np.where(tiny, np.inf, deviation * unit)


def scaled(x: np.ndarray, centre: np.ndarray, width: np.ndarray) -> Tensor:
    """Columns in units of their deviation, float32."""
    return torch.from_numpy(((np.asarray(x, dtype=np.float64) - centre) / width).astype(np.float32))


def classify(labels: np.ndarray) -> Task:
    classes, codes = np.unique(labels, return_inverse=True)
    return Task(torch.from_numpy(codes.astype(np.int64)), max(len(classes), 2), F.cross_entropy)


def regress(values: np.ndarray) -> Task:
    target = standardised(values.reshape(len(values), -1))
    return Task(target, target.shape[1], F.mse_loss)


def default_network(features: int, outputs: int, hidden: int) -> nn.Module:
    """One hidden layer, or none at all."""
    if not hidden:
        return nn.Linear(features, outputs)
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def learn_scores(x: Tensor, task: Task, selector: FeatureSelector, network: nn.Module, budget: Budget) -> Tensor:
    """Train the network behind the selector and return the scores, in units of their spread."""
    model = nn.Sequential(selector, copy.deepcopy(network)).train()
    rest = [parameter for parameter in model.parameters() if parameter is not selector.scores]
    groups = [{"params": rest, "lr": budget.rate}, {"params": [selector.scores], "lr": budget.score_rate}]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]])
    rows, watch = shuffled(len(x), budget.batch_size), _Watch(selector, budget.patience)
    for step in budget.bar(range(budget.steps)):
        anneal(model, step / budget.steps)
        index = next(rows)
        loss = task.loss(model(x[index]), task.target[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, budget.steps // NUM_CHECKS) == 0 and watch.decided():
            break
    return selector.scores.detach() / selector.scores.detach().std(correction=0).clamp(min=1)


def shuffled(n: int, batch_size: int) -> Iterator[Tensor]:
    """Batches of shuffled rows without end; every row once in each round."""
    while True:
        order = torch.randperm(n)
        whole = order.split(batch_size)
        yield from whole[: max(1, n // batch_size)]


class _Watch:
    """Whether the choice is made: the same features at ``patience`` looks, and next to no mask left for the others."""

    def __init__(self, selector: FeatureSelector, patience: int | None) -> None:
        self.selector, self.patience, self.same = selector, patience, 0
        self.last = selector.indices

    def decided(self) -> bool:
        chosen = self.selector.indices
        self.same = self.same + 1 if torch.equal(chosen, self.last) else 0
        self.last = chosen
        if self.patience is None or self.same < self.patience:
            return False
        with torch.no_grad():
            kept = self.selector.probabilities[chosen].mean()
        return bool(kept > 0.99)
