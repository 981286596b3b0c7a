"""Implicit maximum likelihood."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Generator, Tensor
from torch.autograd.function import Function
from torch.compiler import is_compiling

from khot._tensors import Number, column, source, standard_gamma
from khot.estimators._table import Objective, estimator
from khot.primitives.refuse import no_second_derivative
from khot.primitives.select import hard_mask


@estimator(paper="Niepert, Minervini and Franceschi 2021 (I-MLE)", double_backward=False, forward_mode=False, compiles=False)
def perturb_and_map(
    objective: Objective,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    num_samples: int = 1,
    generator: Generator | None = None,
    dim: int = -1,
    strength: float = 1.0,
) -> Tensor:
    r"""Implicit maximum likelihood: the top-k of noisy scores, less that of the same scores moved against the gradient.

    .. math:: \tfrac1\lambda \bigl(\operatorname{top}_k(x + \tau\epsilon) - \operatorname{top}_k(x + \tau\epsilon - \lambda \nabla f)\bigr)

    The noise is of the sum-of-gamma kind, whose sum over k items is about a Gumbel. Niepert, Minervini and Franceschi 2021 (I-MLE).
    The arguments are those of :func:`khot.estimators.straight_through`, and

    Args:
        strength: the step :math:`\lambda` against the gradient.

    Example:
        >>> scores = torch.tensor([0.0, 0.1, 0.2, 0.3], requires_grad=True)
        >>> perturb_and_map(lambda z: z @ torch.tensor([9.0, 0.0, 0.0, 0.0]), scores, k=2, num_samples=16).backward()
        >>> scores.grad[0] > 0
        tensor(True)
    """
    if is_compiling():
        raise NotImplementedError("perturb_and_map does not compile (its row says so); call it outside torch.compile")
    noise = _sum_of_gammas((num_samples, *scores.shape), k, scores, generator)
    # The gradient of a mean over samples is divided by their number; the move of each sample is not.
    step = strength * num_samples
    return objective(_PerturbAndMap.apply(scores + column(tau, scores) * noise, k, step)).mean(0)


class _PerturbAndMap(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(keys: Tensor, k: int, step: float) -> Tensor:
        return hard_mask(keys, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
        keys, ctx.k, ctx.step = inputs
        ctx.save_for_backward(keys, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        keys, mask = ctx.saved_tensors
        with torch.no_grad():
            found = (mask - hard_mask(keys - ctx.step * grad, ctx.k)) / ctx.step
        return no_second_derivative(found, "perturb_and_map", keys, grad), None, None


def _sum_of_gammas(shape: tuple[int, ...], k: int, like: Tensor, generator: Generator | None, terms: int = 10) -> Tensor:
    k = max(k, 1)
    shapes = torch.full((terms, *shape), 1 + 1 / k, dtype=like.dtype, device=like.device)
    # A gamma of small shape, from one of shape 1 + a and a uniform: G(a) = G(1 + a) U^(1/a). torch has a generator for this one only.
    gammas = standard_gamma(shapes, generator=generator)
    gammas = gammas * torch.rand(shapes.shape, dtype=like.dtype, device=like.device, **source(generator)).pow(k)
    order = torch.arange(1, terms + 1, dtype=like.dtype, device=like.device).view(-1, *[1] * len(shape))
    return (gammas / order).sum(0) - math.log(terms) / k
