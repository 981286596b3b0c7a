"""The sampling verbs: random k-hot masks whose expectation is a soft mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from khot._tensors import Number, form_for, readable, wide_dtype, work_dtype
from khot.checks import check_options, check_scores
from khot.hard import through
from khot.registry import Design, Relaxation, find_design, find_method

_SINGLE = torch.finfo(torch.float32).eps  # double precision is often made from single
_ROUNDINGS = 16  # how many roundings of the sum, in units of eps * k, still count as a whole number


def sample(
    probs: Tensor,
    *,
    design: str = "systematic",
    generator: Generator | None = None,
    dim: int = -1,
    num_samples: int | None = None,
    k: int | None = None,
    **options: Any,
) -> Tensor:
    r"""A random k-hot mask with prescribed inclusion probabilities.

    .. math:: z \in \{0, 1\}^n, \quad \textstyle\sum_i z_i = k, \quad \mathbb{E}[z] = \pi

    Args:
        probs: any shape, in [0, 1], with a whole sum k along ``dim`` that may differ between rows.
        design: a name in :data:`khot.DESIGNS`; its row says whether the probabilities are exact and the size is fixed.
        generator: source of random numbers.
        dim: the dimension to sample along.
        num_samples: how many independent masks; they are stacked in front.
        k: the sum, where it shall be checked, or where half precision leaves it in doubt.
        options: the design's own.

    Returns:
        0/1 mask like ``probs``, without gradient; ``(num_samples, *probs.shape)`` where ``num_samples`` is given.

    Example:
        >>> z = sample(torch.tensor([0.2, 0.7, 0.8, 0.3, 1.0, 0.0]), num_samples=1000)
        >>> z.sum(-1).unique()
        tensor([3.])
        >>> (z.mean(0) - torch.tensor([0.2, 0.7, 0.8, 0.3, 1.0, 0.0])).abs().max() < 0.1
        tensor(True)
    """
    if type(probs) is not Tensor and (form := form_for("sample", probs)):
        return form(probs, design=design, generator=generator, dim=dim, num_samples=num_samples, k=k, **options)
    row = find_design(design)
    check_scores(probs, dim, "probs")
    x = _work(probs, dim)
    size = check_probs(x, k, eps=torch.finfo(probs.dtype).eps, whole=row.fixed_size)
    return _draw(row, x, size, generator, num_samples, options).to(probs.dtype).movedim(-1, dim % probs.ndim - probs.ndim)


def sample_topk(
    scores: Tensor,
    k: Number,
    tau: Number = 1.0,
    *,
    method: str = "sigmoid",
    design: str = "systematic",
    generator: Generator | None = None,
    largest: bool = True,
    dim: int = -1,
    num_samples: int | None = None,
    design_options: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:
    r"""A random k-hot mask whose expectation and gradient are those of the soft top-k.

    Args:
        scores: any shape; -inf is never drawn, +inf always.
        k: how many to draw along ``dim``; a fraction draws the whole number below or above, with ``k`` as the mean.
        tau: temperature; towards 0 the draw is the hard top-k.
        method: a name in :data:`khot.RELAXATIONS` whose mask sums to k.
        design: a name in :data:`khot.DESIGNS`.
        generator: source of random numbers.
        largest: ``False`` prefers the smallest: the same call on ``-scores``, so that +inf is never drawn.
        dim: the dimension to select along.
        num_samples: how many independent masks; they are stacked in front.
        design_options: the design's own options, e.g. ``{"order": "fixed"}``.
        options: the method's own.

    Returns:
        0/1 mask like ``scores`` (``(num_samples, *scores.shape)`` where that is given), with the gradient of
        :func:`khot.soft_topk`: for designs with exact probabilities that gradient is unbiased for objectives affine in the mask.

    Example:
        >>> scores = torch.tensor([1.0, 4.0, 2.0, 3.0], requires_grad=True)
        >>> mask = sample_topk(scores, k=2, tau=0.5)
        >>> mask.sum().item()
        2.0
        >>> (mask * torch.tensor([0.0, 1.0, 2.0, 3.0])).sum().backward()
        >>> scores.grad
        tensor([-0.1921, -0.1018, -0.0497,  0.3436])
    """
    if type(scores) is not Tensor and (form := form_for("sample_topk", scores)):
        drawn: dict[str, Any] = {"design": design, "num_samples": num_samples, "design_options": design_options}
        return form(scores, k, tau, method=method, generator=generator, largest=largest, dim=dim, **drawn, **options)
    row = find_design(design)
    method_row = find_method(method)
    if not (method_row.sums_to_k and method_row.bounded):
        raise ValueError(f"method {method!r} gives no probabilities that sum to k; choose one whose row says sums_to_k and bounded")
    check_scores(scores, dim)
    if dim == -1 and largest and num_samples is None and not options:
        mask = _draw_ordinary(row, method_row, scores, k, tau, generator, design_options or {})
        if mask is not None:
            return mask
    # In half precision a mask of many items does not sum to k: it is made in single.
    wide = _as(scores if largest else -scores, work_dtype(scores))
    soft = method_row.topk(wide, k, tau, dim=dim, **options)
    hard = _as(_draw_soft(row, _work(soft, dim), k, generator, num_samples, design_options or {}), scores.dtype)
    from_end = dim % soft.ndim - soft.ndim
    return through(hard if from_end == -1 else hard.movedim(-1, from_end), _as(soft, scores.dtype))


def _draw_ordinary(
    row: Design, method: Relaxation, scores: Tensor, k: Number, tau: Number, generator: Generator | None, options: dict[str, Any]
) -> Tensor | None:
    """A draw without a gradient, written over the mask it is drawn from; ``None`` where the call is not that ordinary."""
    check_options(row.name, options, row.options, "design")
    learns = scores.requires_grad and torch.is_grad_enabled()
    if learns or row.draw_soft is None or method.ordinary is None or work_dtype(scores) is not scores.dtype or not scores.numel():
        return None
    soft = method.ordinary(scores, k, tau)
    return None if soft is None else row.draw_soft(soft, float(k), generator=generator, over=True, **options)


def _draw_soft(
    row: Design, soft: Tensor, k: Number, generator: Generator | None, num_samples: int | None, options: dict[str, Any]
) -> Tensor:
    """Sample a soft mask known to sum to ``k``; a fraction is filled up by a phantom item that is dropped again."""
    shape = _shape(row, soft, num_samples, options)
    if row.draw_soft is not None and 0 not in shape:
        column = k.detach().expand(soft.shape[:-1]).unsqueeze(-1).expand(*shape[:-1], 1) if isinstance(k, Tensor) else float(k)
        drawn = row.draw_soft(soft if num_samples is None else soft.expand(shape), column, generator=generator, **options)
        if drawn is not None:
            return drawn
    lost = soft.isnan().any(-1, keepdim=True)
    soft = soft.masked_fill(lost, 0.0)
    wanted = wanted_size(soft.sum(-1, keepdim=True, dtype=wide_dtype(soft)), k)
    size = wanted.ceil()
    if isinstance(k, int) or readable(size) and bool((size == wanted).all()):
        out = _draw(row, soft, size.long(), generator, num_samples, options)
    else:
        phantom = (size - wanted).to(soft.dtype)
        out = _draw(row, torch.cat((soft, phantom), -1), size.long(), generator, num_samples, options)[..., :-1]
    return out.masked_fill(lost, torch.nan)


def _shape(row: Design, probs: Tensor, num_samples: int | None, options: dict[str, Any]) -> torch.Size:
    """The shape of the draws, after a look at the options."""
    check_options(row.name, options, row.options, "design")
    if num_samples is not None and num_samples < 0:
        raise ValueError(f"num_samples must be at least 0, got {num_samples}")
    return probs.shape if num_samples is None else torch.Size((num_samples, *probs.shape))


def wanted_size(total: Tensor, k: Number) -> Tensor:
    """How many to draw of rows that sum to ``total``; where fewer than ``k`` items take part, all of them are drawn."""
    wanted = torch.as_tensor(k, dtype=total.dtype, device=total.device).detach().expand(total.shape[:-1]).unsqueeze(-1)
    return torch.where((total - wanted).abs() < 0.5, wanted, total.round())


def _draw(
    row: Design, probs: Tensor, size: Tensor, generator: Generator | None, num_samples: int | None, options: dict[str, Any]
) -> Tensor:
    shape = _shape(row, probs, num_samples, options)
    if 0 in shape:
        return probs.new_zeros(shape)
    if row.many:
        return row.draw(probs, size, generator=generator, num_samples=num_samples or 1, **options).view(shape)
    return row.draw(probs.expand(shape), size.expand(*shape[:-1], 1), generator=generator, **options)


def _work(probs: Tensor, dim: int) -> Tensor:
    """Last dimension, single precision or better, no gradient."""
    probs = probs.detach() if probs.requires_grad else probs
    return _as(probs if dim in (-1, probs.ndim - 1) else probs.movedim(dim, -1), work_dtype(probs))


def _as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In this dtype: a call of ``to`` that changes nothing costs as much as a thousand items."""
    return values if values.dtype is dtype else values.to(dtype)


def check_probs(probs: Tensor, k: int | None = None, *, eps: float = _SINGLE, whole: bool = True) -> Tensor:
    """The whole numbers ``(..., 1)`` that the rows sum to; raises where ``probs`` are no probabilities or do not sum to them."""
    check_range(probs)
    total = probs.detach().sum(-1, keepdim=True, dtype=wide_dtype(probs))
    size = total.round().long() if k is None else torch.full_like(total, k, dtype=torch.long)
    if whole and readable(total):
        check_sum(total, size, eps, probs.shape[-1], k)
    return size


def check_range(probs: Tensor) -> None:
    """Raise where ``probs`` are no probabilities."""
    if not readable(probs) or probs.numel() == 0:
        return
    low, high = probs.detach().aminmax()  # both nan if there is one
    if not (low >= 0 and high <= 1):
        if low.isnan():
            raise ValueError("probs must not contain nan; sample_topk(scores, k) keeps a nan in its own row")
        raise ValueError(f"probs must lie in [0, 1], got values from {low:g} to {high:g}; sample_topk(scores, k) takes any scores")


def check_sum(total: Tensor, size: Tensor, eps: float, n: int, k: int | None) -> None:
    """Raise where rows of ``n`` probabilities of precision ``eps`` that sum to ``total`` do not sum to ``size``."""
    if k is not None and not 0 <= k <= n:
        raise ValueError(f"k must be between 0 and n={n}, got {k}")
    allowed = (_ROUNDINGS * max(eps, _SINGLE) * total.clamp(min=1)).clamp(max=0.25 if k is None else 0.5)
    off = (total - size).abs() > allowed
    if bool(off.any()):
        worst = total[off][0].item()
        must = "a whole number" if k is None else f"k={k}"
        raise ValueError(f"probs must sum to {must} along dim, got a sum of {worst:.9g}; sample_topk(scores, k) makes such probabilities")
