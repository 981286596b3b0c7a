"""A network with 5 % of its weights: one budget over all layers, learned while it trains, on scikit-learn's digits.

    python examples/prune.py [--quick] [--density 0.05] [--out prune.png]

Needs: pip install khot[examples]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import khot

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def load() -> Data:
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.3, random_state=0, stratify=y)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_y, test_y = (torch.tensor(part) for part in parts[2:])
    return train_x, test_x, train_y, test_y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def train(model: nn.Module, data: Data, steps: int, label: str) -> None:
    x, _, y, _ = data
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in tqdm(range(steps), desc=label):
        khot.nn.anneal(model, step / steps)  # does nothing where there is no khot layer
        rows = torch.randint(len(x), (128,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def accuracy(model: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return float((model.eval()(data[1]).argmax(-1) == data[3]).float().mean())


def plain_magnitude(scores: Tensor, k: Any, tau: float) -> Tensor:
    """The hard mask of the largest magnitudes: gradual magnitude pruning, the strong baseline."""
    return khot.topk_mask(scores, k)


def cut_once(model: nn.Module, density: float) -> None:
    """The weak baseline: train dense, then cut the smallest weights."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]  # pyright: ignore[reportGeneralTypeIssues]
    flat = torch.cat([layer.weight.detach().abs().flatten() for layer in layers])
    mask = khot.topk_mask(flat, round(density * len(flat)))
    with torch.no_grad():
        for layer, part in zip(layers, mask.split([layer.weight.numel() for layer in layers]), strict=True):
            layer.weight.mul_(part.view_as(layer.weight))


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer steps")
    options.add_argument("--density", type=float, default=0.05)
    options.add_argument("--out", type=Path, default=Path("prune.png"), help="the picture")
    given = options.parse_args(argv)
    steps = 150 if given.quick else 3000
    data, found = load(), {}

    dense = network()
    train(dense, data, steps, "dense")
    found["dense"] = accuracy(dense, data)
    cut_once(dense, given.density)
    found["dense, then cut"] = accuracy(dense, data)

    kept = None
    for name, choices in {"gradual magnitude": {"method": plain_magnitude}, "khot (soft mask)": {}}.items():
        model = network()
        sparse = khot.nn.sparsify(model, given.density, **choices)
        train(model, data, steps, name)
        khot.nn.anneal(model, 1.0)
        kept = sparse.report()
        sparse.harden()  # plain layers with exact zeros
        found[name] = accuracy(model, data)

    assert kept is not None
    for name, value in found.items():
        print(f"{name:20} accuracy {value:.3f}")
    for name, part in kept.items():
        print(f"layer {name}: {part.kept} of {part.total} weights")
    fast = khot.nn.to_csr(model)
    print(f"in compressed rows   accuracy {accuracy(fast, data):.3f}")
    draw(model, given.out)
    return found


def draw(model: nn.Module, path: Path) -> None:
    """How many weights look at each pixel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = model[0]  # pyright: ignore[reportIndexIssue]
    weight = first.weight if isinstance(first, nn.Linear) else _dense(first)
    figure, axis = plt.subplots(figsize=(3.4, 3))
    shown = axis.imshow((weight != 0).sum(0).reshape(8, 8), cmap="viridis")
    figure.colorbar(shown, ax=axis)
    axis.set(title="weights left at each pixel", xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def _dense(layer: nn.Module) -> Tensor:
    size = (layer.out_features, layer.in_features)
    return torch.sparse_csr_tensor(layer.crow, layer.col, layer.values, size, check_invariants=False).to_dense()


if __name__ == "__main__":
    main()
