"""Relaxed subset sampling, one draw after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import Number, column
from khot.primitives.limits import check_size
from khot.registry import relaxation


def _log_rest(logits: Tensor) -> Tensor:
    """``log(1 - softmax(logits))``; for the largest entry from the others, as 1 - p loses them."""
    log_p = torch.log_softmax(logits, -1)
    top = log_p.detach().argmax(-1, keepdim=True)
    largest = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, top, torch.ones_like(top, dtype=torch.bool))
    others = torch.logsumexp(log_p.masked_fill(largest, -torch.inf), -1, keepdim=True)
    alone = others == -torch.inf  # nothing else is left to draw; the rows that follow are not used
    others = torch.where(alone, 0.0, torch.logsumexp(log_p.masked_fill(largest & ~alone, -torch.inf), -1, keepdim=True))
    small = torch.where(largest, -1.0, log_p)
    return torch.where(largest, others, torch.log1p(-small.exp()))


def _gumbel(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    uniform = torch.rand(scores.shape, generator=generator, dtype=scores.dtype, device=scores.device)
    return -(-uniform.clamp(min=torch.finfo(scores.dtype).tiny).log()).log()


def _matrix(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    noise: bool = False,
    generator: torch.Generator | None = None,
    among: Among | None = None,
) -> Tensor:
    check_size("sequential", *scores.shape[:-1], k, scores.shape[-1])
    keys = scores + _gumbel(scores, generator) if noise else scores
    width, rows = column(tau, scores), []
    logits = _hidden(keys / width, among)
    for i in range(k):
        rows.append(torch.softmax(logits, -1))
        if i + 1 < k:
            logits = _hidden(logits + _log_rest(logits) / width, among)
    return torch.stack(rows, -2) if rows else scores.unsqueeze(-2)[..., :0, :]


def _hidden(logits: Tensor, among: Among | None) -> Tensor:
    return logits if among is None else logits.masked_fill(~among.items, -torch.inf)


@relaxation(
    "sequential",
    kind="matrix",
    cost="O(nk)",
    paper="Xie, Ermon 2019; Ploetz, Roth 2018",
    special=_matrix,
    smooth=False,
    bounded=False,
    monotone=False,
    complete=False,
    scale_free=False,
)
def sequential_matrix(
    scores: Tensor, k: int, tau: Number = 1.0, *, noise: bool = False, generator: torch.Generator | None = None
) -> Tensor:
    r"""Relaxed subset sampling: k softmaxes, each without what the ones before it have taken.

    .. math:: p^{(i)} = \mathrm{softmax}(a^{(i)} / \tau), \quad a^{(i+1)} = a^{(i)} + \log(1 - p^{(i)}), \quad a^{(1)} = x

    With Gumbel noise on the scores the hard limit is a draw of k items without replacement; without it, the top-k. The subtracted
    logarithm is not divided by the scale of the scores, so that at a temperature of 1 or more even large scores stay soft.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature, a number or ``(...)``.
        noise: add Gumbel noise to the scores.
        generator: of that noise.

    Returns:
        ``(..., k, n)``, rows that sum to 1. The columns may sum to more than 1.

    Example:
        >>> sequential_matrix(torch.tensor([1.0, 3.0, 2.0]), k=2, tau=0.5)
        tensor([[0.0159, 0.8668, 0.1173],
                [0.1259, 0.1259, 0.7482]])
    """
    return _matrix(scores, k, tau, noise=noise, generator=generator)
