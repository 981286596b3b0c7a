"""The trapezoidal rule between pairs of subsets."""

from __future__ import annotations

from torch import Generator, Tensor

from khot._tensors import Number
from khot.estimators._table import Objective, estimator, k_subset
from khot.hard import straight_through
from khot.primitives.refuse import once


@estimator(paper="Liu et al. 2023 (ReinMax) for one-hot vectors", double_backward=False)
def second_order(
    objective: Objective,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    num_samples: int = 1,
    generator: Generator | None = None,
    dim: int = -1,
) -> Tensor:
    r"""The trapezoidal rule between pairs of subsets; unbiased for quadratic objectives of the k-subset distribution.

    The exact gradient is :math:`\tfrac12 \mathbb{E}[(z - z')(f(z) - f(z'))]` over two independent samples. With the difference of
    f replaced by :math:`\tfrac12 (\nabla f(z) + \nabla f(z'))^\top (z - z')`, exact for quadratics, it is

    .. math:: \tfrac12\, \mathbb{E}\bigl[(\Sigma + (z - \pi)(z - \pi)^\top) \nabla f(z)\bigr] , \quad \Sigma = \operatorname{Cov} z,

    for one-hot vectors the ReinMax estimator of Liu et al. 2023. The arguments are those of :func:`khot.estimators.straight_through`.

    Example:
        >>> scores = torch.zeros(3, requires_grad=True)
        >>> loss = second_order(lambda z: z.prod(-1) + z[..., 0], scores, k=2, num_samples=4)
        >>> loss.shape, torch.autograd.grad(loss, scores)[0].shape
        (torch.Size([]), torch.Size([3]))
    """
    # The rule is for the gradient alone: what is held fixed in it would be missing from a second derivative.
    chosen = k_subset(once(scores, "second_order"), k, tau)
    z, mean = chosen.sample((num_samples,), generator), chosen.mean
    away = z - mean.detach()
    soft = (mean + away * (away * chosen.logits).nan_to_num(0.0, 0.0, 0.0).sum(-1, keepdim=True)) / 2
    return objective(straight_through(z, soft)).mean(0)
