"""Relaxed subset sampling."""

from __future__ import annotations

from torch import Generator, Tensor

from khot._tensors import Number, column
from khot.estimators._table import Objective, estimator
from khot.hard import straight_through, topk_mask
from khot.registry import find_method
from khot.relaxations.sequential import gumbel_noise


@estimator(paper="Xie and Ermon 2019", draws="gumbel")
def relaxed_gumbel(
    objective: Objective,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    num_samples: int = 1,
    generator: Generator | None = None,
    dim: int = -1,
    softness: float = 0.5,
    hard: bool = False,
) -> Tensor:
    r"""k softmaxes one after the other on Gumbel-perturbed scores, each dimming what the last one took.

    Biased towards the relaxation: the objective sees a soft mask, that of :func:`khot.sequential_matrix`. Xie and Ermon 2019 (relaxed
    subset sampling). The arguments are those of :func:`khot.estimators.straight_through`, and

    Args:
        softness: temperature of the softmaxes, small for nearly hard masks.
        hard: evaluate the objective on the hard top-k of the same noise, with the gradient of the soft mask.

    Example:
        >>> scores = torch.zeros(4, requires_grad=True)
        >>> round(relaxed_gumbel(lambda z: z.sum(-1), scores, k=2).item(), 4)
        2.0
    """
    logits = (scores / column(tau, scores)).expand(num_samples, *scores.shape)
    keys = logits + gumbel_noise(logits, generator)
    soft = find_method("sequential").topk(keys, k, softness)
    return objective(straight_through(topk_mask(keys, k), soft) if hard else soft).mean(0)
