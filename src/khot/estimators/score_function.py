"""The log-derivative trick."""

from __future__ import annotations

from torch import Generator, Tensor

from khot._tensors import Number
from khot.estimators._table import Objective, estimator, k_subset


@estimator(paper="Williams 1992; Kool et al. 2019 (baseline)")
def score_function(
    objective: Objective,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    num_samples: int = 2,
    generator: Generator | None = None,
    dim: int = -1,
) -> Tensor:
    r"""The log-derivative trick on the k-subset distribution, each sample measured against the mean of the others.

    .. math:: \tfrac1S \textstyle\sum_s \bigl(f(z_s) - \tfrac1{S-1} \sum_{r \ne s} f(z_r)\bigr) \nabla \log p(z_s)

    Unbiased for every objective, which need not be differentiable in the mask; the variance falls with ``num_samples``, of which
    there are 2 at least. Williams 1992; Kool et al. 2019 (baseline). The objective must give one loss for each row of ``scores``, the
    other arguments are those of :func:`khot.estimators.straight_through`.

    Example:
        >>> scores = torch.zeros(4, requires_grad=True)
        >>> loss = score_function(lambda z: (z.round() @ torch.arange(4.0)) ** 2, scores, k=2, num_samples=8)
        >>> torch.autograd.grad(loss, scores)[0].sum().abs() < 1e-5
        tensor(True)
    """
    chosen = k_subset(scores, k, tau)
    z = chosen.sample((num_samples,), generator)
    loss = objective(z)
    advantage = (loss - loss.mean(0)).detach() * (num_samples / (num_samples - 1))
    log_prob = chosen.log_prob(z)
    return (loss + advantage * (log_prob - log_prob.detach())).mean(0)
