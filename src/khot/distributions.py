"""The k-subset distribution: the softmax family over all subsets of size k."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import torch
from torch import Generator, Size, Tensor
from torch.distributions import Distribution, constraints, register_kl

from khot._tensors import readable, wide_dtype
from khot.checks import check_k, check_scores
from khot.hard import straight_through, topk_mask
from khot.primitives.calibrate import calibrate
from khot.primitives.pairs import pair_probs
from khot.primitives.poisson_binomial import log_chance, log_partition, marginals, tilted
from khot.primitives.subsets import draw_subsets
from khot.sampling import check_probs


class k_hot(constraints.Constraint):
    """Vectors of zeros and exactly ``k`` ones."""

    is_discrete = True
    event_dim = 1

    def __init__(self, k: int) -> None:
        self.k = k
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return ((value == 0) | (value == 1)).all(-1) & ((value == 1).sum(-1) == self.k)

    def __repr__(self) -> str:
        return f"k_hot(k={self.k})"


class KSubset(Distribution):
    r"""The maximum-entropy distribution over subsets of size k (conditional Poisson).

    .. math:: p(z) = \frac{\exp(\lambda^\top z)}{e_k(\exp \lambda)}, \quad z \in \{0, 1\}^n,\ \textstyle\sum_i z_i = k

    At ``k = 1`` it is :class:`torch.distributions.OneHotCategorical`. Sums over subsets cost O(nk) and are done in double precision
    whatever the dtype, stable for any logits. See :mod:`khot.primitives.poisson_binomial`. Everything but a sample is differentiable
    any number of times, backwards and forwards; in ``probs`` along directions that keep their sum.

    Args:
        k: the size, a whole number.
        probs: ``(..., n)`` inclusion probabilities that sum to k; the logits are calibrated to them.
        logits: ``(..., n)``, up to a common constant; -inf excludes an item, +inf makes it certain.
        validate_args: whether to look at the values given, here and in ``log_prob``; by default as torch's distributions do. Without it
            a ``k`` beyond n selects everything, and no sample has a probability.

    Example:
        >>> d = KSubset(k=2, logits=torch.logit(torch.tensor([0.3, 0.6, 0.5, 0.2])))
        >>> d.mean
        tensor([0.3568, 0.7622, 0.6595, 0.2216])
        >>> d.log_prob(torch.tensor([0.0, 1.0, 1.0, 0.0])).exp()
        tensor(0.4541)
        >>> KSubset(k=2, probs=torch.tensor([0.9, 0.5, 0.5, 0.1])).sample((3,)).sum(-1)
        tensor([2., 2., 2.])
    """

    has_rsample = True
    has_enumerate_support = True
    arg_constraints = {  # noqa: RUF012  # pyright: ignore[reportAssignmentType]  read by torch
        "probs": constraints.independent(constraints.unit_interval, 1),
        "logits": constraints.real_vector,
    }

    def __init__(self, k: int, probs: Tensor | None = None, logits: Tensor | None = None, *, validate_args: bool | None = None) -> None:
        given = logits if probs is None else probs
        if given is None or probs is not None and logits is not None:
            raise ValueError("give exactly one of probs and logits")
        check_scores(given, name="logits" if probs is None else "probs")
        validate = Distribution._validate_args if validate_args is None else validate_args
        if validate:
            check_k(k, given, fractional=False)
        self.k, self._dtype, self._probs = int(k), given.dtype, probs
        if probs is not None and validate:
            check_probs(probs, self.k, eps=torch.finfo(probs.dtype).eps)
        self.logits: Tensor = given if probs is None else calibrate(given, self.k)
        if validate:
            self._check_feasible()
        super().__init__(given.shape[:-1], given.shape[-1:], validate_args=False)
        self._validate_args = validate

    def _check_feasible(self) -> None:
        if not readable(self.logits) or self.logits.numel() == 0:
            return
        low, high = self.logits.detach().aminmax()  # both nan if there is one
        if low.isnan():
            raise ValueError("logits must not contain nan")
        if low.isfinite() and high.isfinite():
            return
        certain, possible = (self.logits == torch.inf).sum(-1), (self.logits > -torch.inf).sum(-1)
        if bool((certain > self.k).any()) or bool((possible < self.k).any()):
            raise ValueError(f"no subset of size k={self.k} has all items with logit +inf and none with -inf; change k or the logits")

    @property
    def support(self) -> constraints.Constraint:
        return k_hot(self.k)

    @property
    def probs(self) -> Tensor:
        """The inclusion probabilities."""
        return self.mean

    @property
    def mean(self) -> Tensor:
        """The inclusion probabilities, differentiable in the parameters."""
        return self._mean().to(self._dtype)

    def _mean(self) -> Tensor:
        """The same in double precision, as given or computed."""
        return marginals(self.logits, self.k).probs if self._probs is None else self._probs.to(wide_dtype(self._probs))

    @property
    def variance(self) -> Tensor:
        mean = self._mean()
        return (mean * (1 - mean)).to(self._dtype)

    @property
    def mode(self) -> Tensor:
        return topk_mask(self.logits, min(self.k, self.event_shape[0])).to(self._dtype)

    @property
    def joint(self) -> Tensor:
        r"""Joint inclusion probabilities ``(..., n, n)``: :math:`\pi_{ij} = \Pr[z_i = z_j = 1]`, the diagonal that of the mean.

        O(n^2 sqrt(k)), see :mod:`khot.primitives.pairs`.
        """
        return pair_probs(self.logits, self.k, self.mean)

    @property
    def covariance(self) -> Tensor:
        """Covariance matrix ``(..., n, n)``: the derivative of the mean in the logits."""
        mean = self._mean()
        return (pair_probs(self.logits, self.k, mean) - mean.unsqueeze(-1) * mean.unsqueeze(-2)).to(self._dtype)

    @property
    def log_total(self) -> Tensor:
        """The log of the sum of all weights, ``log e_k(exp logits)``, in double precision."""
        return log_partition(self.logits, self.k)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return log_chance(self.logits, self.k, value).to(self._dtype)

    def entropy(self) -> Tensor:
        found = marginals(self.logits, self.k)
        return found.coins.surprise(found.probs, found.rest).to(self._dtype)

    def sample(self, sample_shape: Any = Size(), generator: Generator | None = None) -> Tensor:  # noqa: B008, as in torch
        shape = Size(sample_shape)
        flat = draw_subsets(self.logits.detach(), self.k, shape.numel(), generator)
        return flat.reshape(shape + self.logits.shape).to(self._dtype)

    def rsample(self, sample_shape: Any = Size(), generator: Generator | None = None) -> Tensor:  # noqa: B008, as in torch
        """A sample with the gradient of the mean."""
        return straight_through(self.sample(sample_shape, generator), self.mean)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All subsets, ``(number, *batch_shape, n)``; their number is n choose k."""
        n = self.event_shape[0]
        index = torch.tensor(list(combinations(range(n), self.k)), dtype=torch.long, device=self.logits.device)
        index = index.reshape(math.comb(n, self.k), self.k)  # also where k is 0
        masks = torch.zeros(index.shape[0], n, dtype=self._dtype, device=self.logits.device).scatter_(-1, index, 1.0)
        masks = masks.reshape(-1, *[1] * len(self.batch_shape), n)
        return masks.expand(-1, *self.batch_shape, -1) if expand else masks

    def expand(self, batch_shape: Any, _instance: Any = None) -> KSubset:
        new: Any = self._get_checked_instance(KSubset, _instance)
        shape = Size(batch_shape) + self.event_shape
        new.k, new._dtype, new.logits = self.k, self._dtype, self.logits.expand(shape)
        new._probs = None if self._probs is None else self._probs.expand(shape)
        Distribution.__init__(new, Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def __repr__(self) -> str:
        return f"KSubset(k={self.k}, logits: {tuple(self.logits.shape)})"


@register_kl(KSubset, KSubset)
def _kl_ksubset_ksubset(p: KSubset, q: KSubset) -> Tensor:
    if p.k != q.k or p.event_shape != q.event_shape:
        raise ValueError(f"the divergence needs subsets of the same size of the same items, got {p} and {q}")
    own = marginals(p.logits, p.k)
    mean = own.probs
    value = tilted(q.logits, q.k).surprise(mean, own.rest) - own.coins.surprise(mean, own.rest)
    outside = ((q.logits == -torch.inf) & (mean > 0) | (q.logits == torch.inf) & (mean < 1)).any(-1)
    return value.masked_fill(outside, torch.inf).to(p._dtype)
