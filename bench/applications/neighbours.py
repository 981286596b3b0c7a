"""Neighbours: a small network is trained so that the k nearest training images have the right label; MNIST and Fashion-MNIST."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.applications.cells import options, pivot, run
from bench.applications.data import images
from bench.common import Table, chosen, print_tables, race
from khot.nn import SoftKNN
from khot.sklearn._search import nearest

# Accuracies of Grover et al. (ICLR 2019, table 3), best k of 1, 3, 5, 9; Fashion-MNIST with a much larger network.
PUBLISHED = {"mnist": {"pixels": 97.2, "NeuralSort": 99.5, "cross entropy": 99.4},
             "fashion": {"pixels": 85.8, "NeuralSort, ResNet18": 93.5, "cross entropy, ResNet18": 93.4}}  # fmt: skip
KS = (1, 3, 5, 9)
HELD, BATCH, SHIFT = 5000, 200, 2  # validation images, images in a step, pixels that an image is shifted by
EPOCHS = 3

Loss = Callable[[Tensor, Tensor], Tensor]


class Small(nn.Sequential):
    """The network of the protocol: two convolutions of 5 x 5 with 20 and 50 channels, 500 features.

    The largest of four comes before the ReLU: the values are the same, and a step is a fifth faster.
    """

    def __init__(self) -> None:
        convolved = [nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.ReLU()]
        super().__init__(*convolved, nn.Flatten(), nn.Linear(800, 500))


class NCA(nn.Module):
    """Neighbourhood components analysis (Goldberger et al. 2005): the chance that a softmax over distances draws the right label."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        chance = -torch.cdist(z, z).square() / z.shape[-1] ** 0.5
        chance = chance.masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf).log_softmax(-1)
        same = (y[:, None] == y).fill_diagonal_(False)
        return -torch.where(same, chance, -torch.inf).logsumexp(-1)[same.any(-1)].mean()


class Khot(nn.Module):
    def __init__(self, k: int = 9) -> None:
        super().__init__()
        self.knn = SoftKNN(k)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.knn.loss(z, None, y)


class CrossEntropy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(500, 10)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(z.relu()), y)


ROWS: dict[str, Callable[[], nn.Module] | None] = {"khot": Khot, "nca": NCA, "cross-entropy": CrossEntropy, "pixels": None}


def _identity(z: Tensor) -> Tensor:
    return z


VIEWS = {"cross-entropy": (_identity, F.relu)}  # before or after what its classifier sees: the better one on the validation images


def main(argv: list[str]) -> int:
    made = options("neighbours", __doc__)
    made.add_argument("--epochs", type=int)
    made.add_argument("--data-sets", default="fashion,mnist", help="comma separated, default fashion,mnist")
    made.add_argument("--validate", action="store_true", help="score on the validation images only: for tuning")
    made.add_argument("--cost", action="store_true", help="time a step of each loss in turns, and train nothing")
    given = made.parse_args(argv)
    if given.cost:
        print_tables(tables(run("neighbours", given, [{"part": "cost", "batch": BATCH}], _cost)))
        return 0
    epochs = given.epochs or (1 if given.quick else EPOCHS)
    names = ["mnist"] if given.quick else given.data_sets.split(",")
    rows = chosen(given.rows, ROWS, ["khot", "cross-entropy"] if given.quick else None)
    part = "validation" if given.validate else "test"
    cells = [
        {"data": data, "row": row, "seed": seed, "epochs": epochs, "part": part}
        for data in names for seed in range(given.seeds or (1 if given.quick else 3)) for row in rows if row != "pixels" or seed == 0
    ]  # fmt: skip
    print_tables(tables(run("neighbours", given, cells, functools.partial(_cell, folder=given.data))))
    return 0


def _cell(data: str, row: str, seed: int, epochs: int, part: str, folder: Path) -> dict[str, Any]:
    x, y = (torch.from_numpy(values) for values in images(data, "train", folder))
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(x)))
    held, rows = order[: min(HELD, len(x) // 6)], order[min(HELD, len(x) // 6) :]
    torch.manual_seed(seed)
    make, net, found = ROWS[row], nn.Identity(), {}
    if make is not None:
        net = Small().to(memory_format=torch.channels_last)
        found = train(net, make(), x[rows], y[rows], epochs, flip=data == "fashion")
    points = embed(net, x[rows])
    scores = {(each, k): value for each in VIEWS.get(row, (_identity,))
              for k, value in accuracies(each(points), y[rows], each(embed(net, x[held])), y[held]).items()}  # fmt: skip
    view, k = max(scores, key=lambda each: scores[each])
    found |= {"k": k, "validation": scores[view, k], "view": view.__name__}
    if part == "test":
        x, z = (torch.from_numpy(values) for values in images(data, "t10k", folder))
        found["accuracy"] = accuracies(view(points), y[rows], view(embed(net, x)), z)[k]
    return found


def _cost(part: str, batch: int) -> dict[str, Any]:
    """Milliseconds of a training step (network, loss, backward, optimizer), and its ratio to NCA's, round by round."""
    torch.manual_seed(0)
    images, labels = torch.rand(batch, 1, 28, 28).to(memory_format=torch.channels_last), torch.randint(10, (batch,))
    found = race({row: _stepper(ROWS[row], images, labels) for row in ("nca", "khot", "cross-entropy")}, seconds=10.0, rounds=(20, 60))
    return {f"{row}_ms": 1000 * timing.median for row, timing in found.items()} | {"ratio": found["khot"].ratio(found["nca"])}


def _stepper(make: Callable[[], nn.Module] | None, images: Tensor, labels: Tensor) -> Callable[[], object]:
    assert make is not None
    net, loss = Small().to(memory_format=torch.channels_last), make()
    optimizer = torch.optim.AdamW([*net.parameters(), *loss.parameters()], lr=1e-3)
    return functools.partial(_step, net, loss, optimizer, images, labels)


def _step(net: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    value = loss(net(images), labels)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value


def train(net: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, epochs: int, *, flip: bool) -> dict[str, float]:
    """The same optimizer, schedule, images and shifts for every loss."""
    steps = epochs * (len(x) // BATCH)
    optimizer = torch.optim.AdamW([*net.parameters(), *loss.parameters()], lr=1e-3, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(2, steps), pct_start=0.2)
    spent, value = 0.0, torch.zeros(())
    for rows in (rows for _ in range(epochs) for rows in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]):
        images = moved(x[rows], flip).to(memory_format=torch.channels_last)
        began = time.perf_counter()
        value = _step(net, loss, optimizer, images, y[rows])
        spent += time.perf_counter() - began
        schedule.step()
    extra = {"tau": loss.knn.tau.item()} if isinstance(loss, Khot) else {}
    return {"loss": value.item(), "step_ms": 1000 * spent / max(1, steps)} | extra


def moved(x: Tensor, flip: bool) -> Tensor:
    """Images ``(B, 1, 28, 28)``, each shifted by up to ``SHIFT`` pixels and, if asked, half of them mirrored."""
    padded = F.pad(x.view(-1, 1, 28, 28), (SHIFT,) * 4)
    at = torch.randint(2 * SHIFT + 1, (2, len(x), 1)) + torch.arange(28)
    if flip:
        at[1] = torch.where(torch.rand(len(x), 1) < 0.5, at[1].flip(-1), at[1])
    return padded[torch.arange(len(x))[:, None, None], 0, at[0][:, :, None], at[1][:, None, :]].unsqueeze(1)


@torch.no_grad()
def embed(net: nn.Module, x: Tensor) -> Tensor:
    if isinstance(net, nn.Identity):
        return x
    return torch.cat([net(rows.view(-1, 1, 28, 28).to(memory_format=torch.channels_last)) for rows in x.split(1000)])


def accuracies(points: Tensor, labels: Tensor, query: Tensor, truth: Tensor) -> dict[int, float]:
    """Right answers in per cent by the majority of the k nearest, for every k."""
    votes = F.one_hot(labels[nearest(points, query, max(KS)).indices], 10).cumsum(1)  # (M, k, classes)
    return {k: 100 * float((votes[:, k - 1].argmax(-1) == truth).float().mean()) for k in KS}


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    made = []
    timed = [row for row in rows if row["part"] == "cost"]
    if timed:
        columns = ("nca_ms", "khot_ms", "cross-entropy_ms", "ratio")
        body = [[f"batch of {row['batch']}", *(f"{row[column]:.3g}" for column in columns)] for row in timed]
        made.append(Table("ms of a step, in turns", ["", "NCA", "khot", "cross entropy", "khot / NCA"], body, ""))
    rows = [row for row in rows if row["part"] != "cost"]
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        note = "; ".join(f"{data}: " + ", ".join(f"{row} {value}" for row, value in said.items()) for data, said in PUBLISHED.items())
        value = "accuracy" if part == "test" else "validation"
        made.append(pivot(f"{part} accuracy, per cent", mine, "row", "data", value, digits=2, note=f"Published, not rerun: {note}."))
        trained = [row for row in mine if math.isfinite(row.get("step_ms", math.nan))]
        made.append(pivot("ms of a step", trained, "row", "data", "step_ms", digits=1))
    return made
