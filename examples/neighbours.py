"""Digits in the plane: a network puts every digit beside digits of its own kind, so that nearest neighbours can name it.

    python examples/neighbours.py [--quick] [--k 9] [--out neighbours.png]

The same small network is trained three times, to two numbers for each image: so that its soft neighbours are right (khot), so that one
neighbour drawn by a softmax is right (neighbourhood components analysis), and as a classifier whose last hidden layer is kept.

Needs: pip install khot[examples]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn import functional as F

import khot

BATCH = 200


class SoftNeighbours(nn.Module):
    """The share of right labels among the soft neighbours; the batch is its own neighbourhood."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.knn = khot.nn.SoftKNN(k)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.knn.loss(z, None, y)


class Components(nn.Module):
    """Neighbourhood components analysis (Goldberger et al. 2005)."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        chance = -(z.unsqueeze(1) - z).square().sum(-1)
        chance = chance.masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf).log_softmax(-1)
        right = (y.unsqueeze(1) == y).fill_diagonal_(False)
        return -torch.where(right, chance, -torch.inf).logsumexp(-1)[right.any(-1)].mean()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 10)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(z), y)


def train(loss: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """The same network, batches and steps for every loss."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW([*network.parameters(), *loss.parameters()], lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        rows = torch.randperm(len(x))[:BATCH]
        value = loss(network(x[rows] + 0.1 * torch.randn(BATCH, 64)), y[rows])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def score(train_z: np.ndarray, train_y: np.ndarray, test_z: np.ndarray, test_y: np.ndarray, k: int) -> float:
    return float(KNeighborsClassifier(k).fit(train_z, train_y).score(test_z, test_y))


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer steps")
    options.add_argument("--k", type=int, default=9, help="how many neighbours")
    options.add_argument("--out", type=Path, default=Path("neighbours.png"), help="the picture")
    given = options.parse_args(argv)
    steps = 150 if given.quick else 1000

    pixels, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(pixels / 16, labels, test_size=0.4, random_state=0, stratify=labels)
    x, y, held = torch.from_numpy(train_x).float(), torch.from_numpy(train_y), torch.from_numpy(test_x).float()
    accuracy = {"all 64 pixels": score(train_x, train_y, test_x, test_y, given.k)}
    print(f"{'all 64 pixels':28} accuracy {accuracy['all 64 pixels']:.3f}")
    plane: dict[str, np.ndarray] = {}
    losses = {"khot (soft neighbours)": SoftNeighbours(given.k), "neighbourhood components": Components(), "classifier": Classifier()}
    for name, loss in losses.items():
        began = time.perf_counter()
        network = train(loss, x, y, steps)
        seconds = time.perf_counter() - began
        with torch.no_grad():
            near, far = network(x).numpy(), network(held).numpy()
        accuracy[name], plane[name] = score(near, train_y, far, test_y, given.k), far
        print(f"{name:28} accuracy {accuracy[name]:.3f}   two numbers an image   {seconds:5.1f} s")
    draw(plane, test_y, accuracy, given.out)
    return accuracy


def draw(plane: dict[str, np.ndarray], labels: np.ndarray, accuracy: dict[str, float], path: Path) -> None:
    """The test digits where each network puts them, as digits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(plane), figsize=(4.4 * len(plane), 4.6))
    for axis, (name, points) in zip(axes, plane.items(), strict=True):
        for digit in range(10):
            mine = points[labels == digit]
            axis.scatter(*mine.T, s=24, marker=f"${digit}$", linewidths=0.3, color=plt.get_cmap("tab10")(digit))
        axis.set(title=f"{name}: {accuracy[name]:.3f}", xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
