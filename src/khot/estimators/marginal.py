"""Straight-through on the k-subset distribution."""

from __future__ import annotations

from torch import Generator, Tensor

from khot._tensors import Number
from khot.estimators._table import Objective, estimator, k_subset


@estimator(paper="Ahmed et al. 2023 (SIMPLE)")
def marginal(
    objective: Objective,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    num_samples: int = 1,
    generator: Generator | None = None,
    dim: int = -1,
) -> Tensor:
    r"""Straight-through on the k-subset distribution: the gradient of its inclusion probabilities, at its samples.

    Ahmed et al. 2023 (SIMPLE). Unbiased for affine objectives. The arguments are those of :func:`khot.estimators.straight_through`.

    Example:
        >>> scores = torch.zeros(4, requires_grad=True)
        >>> marginal(lambda z: z @ torch.arange(4.0), scores, k=2).backward()
        >>> scores.grad
        tensor([-0.5000, -0.1667,  0.1667,  0.5000])
    """
    return objective(k_subset(scores, k, tau).rsample((num_samples,), generator)).mean(0)
