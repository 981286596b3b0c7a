"""The default: the gradient of the soft mask at a sample."""

from __future__ import annotations

from torch import Generator, Tensor

from khot._tensors import Number
from khot.estimators._table import Objective, estimator
from khot.sampling import sample_topk


@estimator(paper="Bengio, Leonard and Courville 2013", draws="design", fractional=True)
def straight_through(
    objective: Objective,
    scores: Tensor,
    k: Number,
    tau: Number = 1.0,
    *,
    num_samples: int = 1,
    generator: Generator | None = None,
    dim: int = -1,
    method: str = "sigmoid",
    design: str = "systematic",
) -> Tensor:
    r"""The gradient of the soft mask, taken at the sample: :math:`J^\top \nabla f(z)`. The default.

    Low variance, any n; unbiased for affine objectives when the design has exact probabilities, of first order otherwise.

    Args:
        objective: masks ``(num_samples, *scores.shape)`` to losses ``(num_samples, ...)``.
        scores: any shape.
        k: how many to draw along ``dim``; may be a fraction or a tensor, which receives a gradient.
        tau: temperature.
        num_samples: how many masks.
        generator: source of random numbers.
        dim: the dimension to select along.
        method: the relaxation, a name in :data:`khot.RELAXATIONS`.
        design: the sampling design, a name in :data:`khot.DESIGNS`.

    Returns:
        The mean loss, ``(...)``.

    Example:
        >>> scores = torch.zeros(4, requires_grad=True)
        >>> straight_through(lambda z: z @ torch.arange(4.0), scores, k=2).backward()
        >>> scores.grad
        tensor([-0.3750, -0.1250,  0.1250,  0.3750])
    """
    return objective(sample_topk(scores, k, tau, method=method, design=design, generator=generator, num_samples=num_samples)).mean(0)
