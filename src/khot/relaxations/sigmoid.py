"""Sigmoid top-k."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from khot._tensors import Number
from khot.primitives.threshold.autograd import solve_mask
from khot.primitives.threshold.family import Family, Quick, known
from khot.primitives.threshold.ordinary import ordinary
from khot.registry import relaxation


def binary_entropy(y: Tensor) -> Tensor:
    """``-y log y - (1-y) log(1-y)`` in nats, 0 at both ends with a finite slope there."""
    inside = (y > 0) & (y < 1)
    p = torch.where(inside, y, 0.5)
    return torch.where(inside, -torch.special.xlogy(p, p) - torch.special.xlog1py(1 - p, -p), 0.0)


def _slope(u: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return torch.addcmul(y, y, y, value=-1, out=out)


def _sums(u: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    y = u.sigmoid_()
    return y.sum(-1, keepdim=True), _slope(u, y, free).sum(-1, keepdim=True)


SIGMOID = known(
    Family(
        name="sigmoid",
        kernel="sigmoid",
        f=torch.sigmoid,
        inverse=torch.logit,
        slope=lambda y: y * (1 - y),
        entropy=binary_entropy,
        log_f=logsigmoid,
        log_slope=lambda u: logsigmoid(u) + logsigmoid(-u),
        quick=Quick(lambda u, out: torch.sigmoid(u, out=out), _slope, _sums, bow=1 / 32),
    )
)


@relaxation(
    "sigmoid",
    kind="mask",
    cost="O(n)",
    paper="Wijk, Vinuesa, Azizpour 2025; Amos et al. 2019 (LML)",
    grad_k=True,
    native_half=True,
    family=lambda: SIGMOID,
    ordinary=ordinary(SIGMOID),
)
def sigmoid_topk(scores: Tensor, k: Number, tau: Number = 1.0, *, dim: int = -1) -> Tensor:
    r"""Sigmoid top-k: the softmax of k-hot vectors.

    .. math:: y_i = \sigma(x_i / \tau + c), \quad \textstyle\sum_i y_i = k

    the maximiser of :math:`x^\top y + \tau \sum_i H(y_i)` over the k-capped simplex, :math:`H` the binary entropy. It is not softmax
    at ``k = 1`` (for two items it is ``softmax(x / 2)``); the conditional-Poisson marginals are.

    Args:
        scores: ``(..., n)``, or any shape with ``dim`` given.
        k: how many to select; a tensor of shape ``(...)`` receives a gradient.
        tau: temperature, a number or ``(...)``; the limit 0 is the hard top-k.
        dim: the dimension to select along.

    Returns:
        Mask in [0, 1], like ``scores``, that sums to ``k`` along ``dim``.

    Example:
        >>> sigmoid_topk(torch.tensor([3.0, 1.0, 2.0]), k=2, tau=0.1)
        tensor([1.0000, 0.0067, 0.9933])
    """
    return solve_mask(scores, k, tau, SIGMOID)
