"""Other ways to learn a choice of features by gradient, written from their papers: each gets the gradient steps that khot's row gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, BATCH, RATE = 128, 128, 3e-3  # as in TopKSelector


def stochastic_gates(x: np.ndarray, y: np.ndarray, k: int, seed: int, steps: int) -> np.ndarray:
    """STG (Yamada et al. 2020): gates clamp(mu + N(0, .5^2), 0, 1) with a penalty on the expected number of open ones.

    The paper tunes the penalty until enough gates are closed. One run has to do here: the penalty grows by 1 % in a step while more than
    k gates are expected to be open, and falls by 1 % while fewer are. The k largest mu are taken.
    """
    inputs, labels, classes = _data(x, y, seed)
    network = _network(inputs.shape[1], classes)
    mu, noise, penalty = nn.Parameter(torch.full((inputs.shape[1],), 0.5)), 0.5, 0.1
    optimizer = torch.optim.Adam([{"params": network.parameters(), "lr": RATE}, {"params": [mu], "lr": 10 * RATE}])
    for rows in _batches(len(inputs), steps):
        gates = (mu + noise * torch.randn_like(mu)).clamp(0, 1)
        number = torch.special.ndtr(mu / noise).sum()
        loss = F.cross_entropy(network(inputs[rows] * gates), labels[rows]) + penalty * number / k
        _step(optimizer, loss)
        penalty *= 1.01 if float(number.detach()) > k else 1 / 1.01
    return mu.detach().topk(k).indices.sort().values.numpy()


def concrete_autoencoder(x: np.ndarray, y: np.ndarray, k: int, seed: int, steps: int, *, supervised: bool = False) -> np.ndarray:
    """Concrete autoencoder (Balin et al. 2019): k selectors draw one feature each, at a temperature that falls from 10 to .01.

    As published, a decoder reconstructs all features and the labels are not looked at; ``supervised`` predicts them instead. Two
    selectors can choose the same feature: it is counted once, and fewer than k are left.
    """
    inputs, labels, classes = _data(x, y, seed, scale=False)
    logits = nn.Parameter(0.01 * torch.randn(k, inputs.shape[1]))
    network = _network(k, classes if supervised else inputs.shape[1])
    optimizer = torch.optim.Adam([{"params": network.parameters(), "lr": RATE}, {"params": [logits], "lr": 10 * RATE}])
    for step, rows in enumerate(_batches(len(inputs), steps)):
        temperature = 10 * 0.001 ** (step / steps)
        gumbel = -torch.empty_like(logits).exponential_().log()
        out = network(inputs[rows] @ ((logits + gumbel) / temperature).softmax(-1).T)
        _step(optimizer, F.cross_entropy(out, labels[rows]) if supervised else F.mse_loss(out, inputs[rows]))
    return logits.detach().argmax(-1).unique().numpy()


class _Hierarchy(nn.Module):
    """LassoNet's model: a linear part and a network that may use a feature only as strongly as the linear part does."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)
        self.network = _network(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.network(x)

    @torch.no_grad()
    def shrink(self, amount: float, most: float) -> Tensor:
        """One proximal step; returns the length of each feature's linear weights."""
        first = self.network.get_parameter("0.weight")
        linear, inner = hierarchical_prox(self.linear.weight.T, first.T, amount, most)
        self.linear.weight.copy_(linear.T)
        first.copy_(inner.T)
        return linear.norm(dim=-1)


def hierarchical_prox(linear: Tensor, inner: Tensor, amount: float, most: float) -> tuple[Tensor, Tensor]:
    r"""For every row the minimum of the penalty plus the distance, under LassoNet's bound.

    .. math:: \tfrac12\|a - v\|^2 + \tfrac12\|b - u\|^2 + \lambda\|a\| \quad\text{over } a, b \text{ with } |b_i| \le M \|a\|

    With the m largest of :math:`|u|` at the bound, the length of a is :math:`(\|v\| + M \sum_{i \le m} |u_i| - \lambda)_+ / (1 + m M^2)`;
    the right m is the one whose bound lies between the m-th and the next of :math:`|u|` (Lemhadri et al. 2021).

    Args:
        linear: ``(n, outputs)``, the v.
        inner: ``(n, hidden)``, the u.
        amount: lambda.
        most: M.
    """
    length = linear.norm(dim=-1, keepdim=True)
    size = inner.abs().sort(dim=-1, descending=True).values
    count = torch.arange(size.shape[-1] + 1, dtype=size.dtype, device=size.device)
    total = F.pad(size.cumsum(-1), (1, 0))
    lengths = (length + most * total - amount).clamp(min=0) / (1 + count * most**2)  # (n, hidden + 1), one for each m
    fits = most * lengths >= F.pad(size, (0, 1))  # the bound is not below the next value; the first such m is the right one
    chosen = lengths.gather(-1, fits.int().argmax(-1, keepdim=True))
    direction = torch.where(length > 0, linear / length, linear.shape[-1] ** -0.5)  # all directions are equally near to 0
    return direction * chosen, inner.clamp(-most * chosen, most * chosen)


def lassonet(x: np.ndarray, y: np.ndarray, k: int, seed: int, steps: int, *, most: float = 10.0) -> np.ndarray:
    """LassoNet (Lemhadri et al. 2021): train a dense model, then raise an L1 penalty and watch the features leave.

    Half of the steps train the dense model with Adam, half walk along the path by proximal gradient. The path must end when the steps do:
    the penalty grows by 5 % in a step while more features are left than on a curve that falls geometrically to k. The features that
    leave last are taken.
    """
    inputs, labels, classes = _data(x, y, seed)
    model, features, left_at = _Hierarchy(inputs.shape[1], classes), inputs.shape[1], torch.zeros(inputs.shape[1])
    dense, rate, penalty, strength = steps // 2, 1e-2, 1e-2, torch.zeros(inputs.shape[1])
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for step, rows in enumerate(_batches(len(inputs), steps)):
        if step == dense:
            optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        _step(optimizer, F.cross_entropy(model(inputs[rows]), labels[rows]))
        if step >= dense:
            strength = model.shrink(penalty * rate, most)
            left_at[strength > 0] = step
            wanted = features * (k / features) ** ((step + 1 - dense) / (0.95 * (steps - dense)))
            penalty *= 1.05 if int((strength > 0).sum()) > max(k, wanted) else 1.0
    order = left_at + strength / strength.max().clamp(min=1e-30) * 0.5  # of those that stay to the end, the strongest
    return order.topk(k).indices.sort().values.numpy()


def lassonet_package(x: np.ndarray, y: np.ndarray, k: int, seed: int) -> np.ndarray:
    """The authors' package, hidden d/3, batches of 256 and M = 10 as in its own script: no equal budget, minutes a path."""
    try:
        from lassonet import LassoNetClassifier
    except ImportError as error:
        raise SystemExit("the row lassonet-package needs a package: pip install lassonet==0.0.21") from error

    model = LassoNetClassifier(
        hidden_dims=(x.shape[1] // 3,), batch_size=256, M=10, n_iters=(50, 5), patience=(5, 2), path_multiplier=1.05, verbose=0,
        random_state=seed, torch_seed=seed,
    )  # fmt: skip
    model.path(x, y, return_state_dicts=False)
    return model.feature_importances_.topk(k).indices.sort().values.numpy()


def _data(x: np.ndarray, y: np.ndarray, seed: int, *, scale: bool = True) -> tuple[Tensor, Tensor, int]:
    from khot.sklearn._judge import standardised

    torch.manual_seed(seed)
    classes, labels = np.unique(y, return_inverse=True)
    inputs = standardised(x) if scale else torch.from_numpy(x.astype(np.float32))
    return inputs, torch.from_numpy(labels.astype(np.int64)), len(classes)


def _network(features: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))


def _batches(n: int, steps: int) -> Iterator[Tensor]:
    """Shuffled rows, every row once in each round."""
    each = max(1, n // BATCH)
    rounds = (torch.randperm(n).split(BATCH)[:each] for _ in range(math.ceil(steps / each)))
    return (rows for _, rows in zip(range(steps), (rows for batches in rounds for rows in batches), strict=False))


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


STEPPED: dict[str, Callable[..., np.ndarray]] = {"stg": stochastic_gates, "concrete": concrete_autoencoder, "lassonet": lassonet}
