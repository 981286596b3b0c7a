r"""Gradients through a random choice of k items.

Every estimator has the same form: it draws masks, evaluates the objective on them, and returns the mean loss of each row with a
gradient that estimates that of the expected loss in the scores:

    loss = khot.estimators.straight_through(objective, scores, k).mean()
    loss.backward()

``objective`` maps masks ``(num_samples, ..., n)`` to losses ``(num_samples, ...)``; what it is made of gets its ordinary gradient.
With ``k_subset`` in a description, the masks come from :class:`khot.distributions.KSubset` with logits ``scores / tau``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Generator, Tensor
from torch.autograd.function import Function, once_differentiable

from khot._tensors import Number, column, standard_gamma
from khot.checks import check
from khot.distributions import KSubset
from khot.hard import straight_through as _through
from khot.hard import topk_mask
from khot.sampling import sample_topk

Objective: TypeAlias = Callable[[Tensor], Tensor]


class Estimator(Protocol):
    """The one interface: ``(objective, scores, k, tau, *, num_samples, generator) -> loss`` of shape ``(...)``."""

    def __call__(
        self, objective: Objective, scores: Tensor, k: int, tau: Number = 1.0, *, num_samples: int = 1, generator: Generator | None = None
    ) -> Tensor: ...


def straight_through(
    objective: Objective,
    scores: Tensor,
    k: Number,
    tau: Number = 1.0,
    *,
    num_samples: int = 1,
    generator: Generator | None = None,
    method: str = "sigmoid",
    design: str = "systematic",
) -> Tensor:
    r"""The gradient of the soft mask, taken at the sample: :math:`J^\top \nabla f(z)`. The default.

    Low variance, any n; unbiased for affine objectives when the design has exact probabilities, of first order otherwise.

    Example:
        >>> scores = torch.zeros(4, requires_grad=True)
        >>> straight_through(lambda z: z @ torch.arange(4.0), scores, k=2).backward()
        >>> scores.grad
        tensor([-0.3750, -0.1250,  0.1250,  0.3750])
    """
    return objective(sample_topk(scores, k, tau, method=method, design=design, generator=generator, num_samples=num_samples)).mean(0)


def marginal(
    objective: Objective, scores: Tensor, k: int, tau: Number = 1.0, *, num_samples: int = 1, generator: Generator | None = None
) -> Tensor:
    r"""Straight-through on the k-subset distribution: the gradient of its inclusion probabilities, at its samples.

    Ahmed et al. 2023 (SIMPLE). Unbiased for affine objectives.

    Example:
        >>> scores = torch.zeros(4, requires_grad=True)
        >>> marginal(lambda z: z @ torch.arange(4.0), scores, k=2).backward()
        >>> scores.grad
        tensor([-0.5000, -0.1667,  0.1667,  0.5000])
    """
    return objective(_k_subset(scores, k, tau).rsample((num_samples,), generator)).mean(0)


def second_order(
    objective: Objective, scores: Tensor, k: int, tau: Number = 1.0, *, num_samples: int = 1, generator: Generator | None = None
) -> Tensor:
    r"""The trapezoidal rule between pairs of subsets; unbiased for quadratic objectives of the k-subset distribution.

    The exact gradient is :math:`\tfrac12 \mathbb{E}[(z - z')(f(z) - f(z'))]` over two independent samples. With the difference of
    f replaced by :math:`\tfrac12 (\nabla f(z) + \nabla f(z'))^\top (z - z')`, exact for quadratics, it is

    .. math:: \tfrac12\, \mathbb{E}\bigl[(\Sigma + (z - \pi)(z - \pi)^\top) \nabla f(z)\bigr] , \quad \Sigma = \operatorname{Cov} z,

    for one-hot vectors the ReinMax estimator of Liu et al. 2023.

    Example:
        >>> scores = torch.zeros(3, requires_grad=True)
        >>> loss = second_order(lambda z: z.prod(-1) + z[..., 0], scores, k=2, num_samples=4)
        >>> loss.shape, torch.autograd.grad(loss, scores)[0].shape
        (torch.Size([]), torch.Size([3]))
    """
    chosen = _k_subset(scores, k, tau)
    z, mean = chosen.sample((num_samples,), generator), chosen.mean
    away = z - mean.detach()
    soft = (mean + away * (away * chosen.logits).nan_to_num(0.0, 0.0, 0.0).sum(-1, keepdim=True)) / 2
    return objective(_through(z, soft)).mean(0)


def score_function(
    objective: Objective, scores: Tensor, k: int, tau: Number = 1.0, *, num_samples: int = 2, generator: Generator | None = None
) -> Tensor:
    r"""The log-derivative trick on the k-subset distribution, each sample measured against the mean of the others.

    .. math:: \tfrac1S \textstyle\sum_s \bigl(f(z_s) - \tfrac1{S-1} \sum_{r \ne s} f(z_r)\bigr) \nabla \log p(z_s)

    Unbiased for every objective, which need not be differentiable in the mask; the variance falls with ``num_samples``.
    Williams 1992; Kool et al. 2019 (baseline).

    Example:
        >>> scores = torch.zeros(4, requires_grad=True)
        >>> loss = score_function(lambda z: (z.round() @ torch.arange(4.0)) ** 2, scores, k=2, num_samples=8)
        >>> torch.autograd.grad(loss, scores)[0].sum().abs() < 1e-5
        tensor(True)
    """
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2 for a baseline from the other samples, got {num_samples}")
    chosen = _k_subset(scores, k, tau)
    z = chosen.sample((num_samples,), generator)
    loss = objective(z)
    advantage = (loss - loss.mean(0)).detach() * (num_samples / (num_samples - 1))
    log_prob = chosen.log_prob(z)
    return (loss + advantage * (log_prob - log_prob.detach())).mean(0)


def perturb_and_map(
    objective: Objective,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    num_samples: int = 1,
    generator: Generator | None = None,
    strength: float = 1.0,
) -> Tensor:
    r"""Implicit maximum likelihood: the top-k of noisy scores, less that of the same scores moved against the gradient.

    .. math:: \tfrac1\lambda \bigl(\operatorname{top}_k(x + \tau\epsilon) - \operatorname{top}_k(x + \tau\epsilon - \lambda \nabla f)\bigr)

    The noise is of the sum-of-gamma kind, whose sum over k items is about a Gumbel. Niepert, Minervini and Franceschi 2021 (I-MLE).

    Args:
        strength: the step :math:`\lambda` against the gradient.

    Example:
        >>> scores = torch.tensor([0.0, 0.1, 0.2, 0.3], requires_grad=True)
        >>> perturb_and_map(lambda z: z @ torch.tensor([9.0, 0.0, 0.0, 0.0]), scores, k=2, num_samples=16).backward()
        >>> scores.grad[0] > 0
        tensor(True)
    """
    check(scores, k, tau, fractional=False)
    noise = _sum_of_gammas((num_samples, *scores.shape), k, scores, generator)
    return objective(_PerturbAndMap.apply(scores + column(tau, scores) * noise, k, strength)).mean(0)


def relaxed_gumbel(
    objective: Objective,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    num_samples: int = 1,
    generator: Generator | None = None,
    softness: float = 0.5,
    hard: bool = False,
) -> Tensor:
    r"""k softmaxes one after the other on Gumbel-perturbed scores, each dimming what the last one took.

    Biased towards the relaxation: the objective sees a soft mask. Xie and Ermon 2019 (relaxed subset sampling).

    Args:
        softness: temperature of the softmaxes, small for nearly hard masks.
        hard: evaluate the objective on the hard top-k of the same noise, with the gradient of the soft mask.

    Example:
        >>> scores = torch.zeros(4, requires_grad=True)
        >>> relaxed_gumbel(lambda z: z.sum(-1), scores, k=2).item()
        2.0
    """
    check(scores, k, tau, fractional=False)
    keys = scores / column(tau, scores) + _gumbel((num_samples, *scores.shape), scores, generator)
    soft, rest = torch.zeros_like(keys), keys
    for _ in range(k):
        taken = torch.softmax(rest / softness, -1)
        soft = soft + taken
        rest = rest + torch.log1p(-taken.clamp(max=1 - torch.finfo(keys.dtype).eps))
    return objective(_through(topk_mask(keys, k), soft) if hard else soft).mean(0)


ESTIMATORS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {f.__name__: f for f in (straight_through, marginal, second_order, score_function, perturb_and_map, relaxed_gumbel)}
)


def _k_subset(scores: Tensor, k: int, tau: Number) -> KSubset:
    check(scores, k, tau, fractional=False)
    return KSubset(k=int(k), logits=scores / column(tau, scores))


class _PerturbAndMap(Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, k: int, strength: float) -> Tensor:
        mask = topk_mask(keys, k)
        ctx.save_for_backward(keys, mask)
        ctx.k, ctx.strength = k, strength
        return mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # The gradient of a mean over samples is divided by their number; the move of each sample is not.
        keys, mask = ctx.saved_tensors
        count = keys.shape[0]
        return (mask - topk_mask(keys - ctx.strength * count * grad, ctx.k)) / (ctx.strength * count), None, None


def _gumbel(shape: tuple[int, ...], like: Tensor, generator: Generator | None) -> Tensor:
    clock = torch.empty(shape, dtype=like.dtype, device=like.device).exponential_(generator=generator)
    return -clock.clamp(min=torch.finfo(like.dtype).tiny).log()


def _sum_of_gammas(shape: tuple[int, ...], k: int, like: Tensor, generator: Generator | None, terms: int = 10) -> Tensor:
    k = max(int(k), 1)
    shapes = torch.full((terms, *shape), 1 / k, dtype=like.dtype, device=like.device)
    # A gamma of small shape, from one of shape 1 + a and a uniform: G(a) = G(1 + a) U^(1/a). torch has a generator for this one only.
    gammas = standard_gamma(shapes + 1, generator=generator)
    gammas = gammas * torch.rand(shapes.shape, dtype=like.dtype, device=like.device, generator=generator).pow(k)
    order = torch.arange(1, terms + 1, dtype=like.dtype, device=like.device).view(-1, *[1] * len(shape))
    return (gammas / order).sum(0) - torch.log(torch.tensor(float(terms), dtype=like.dtype, device=like.device)) / k
