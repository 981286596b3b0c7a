"""The hard verbs: exact k-hot masks, straight-through, and the rows that were chosen."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import Function

from khot._tensors import Number, form_for, in_forward_mode, is_bare, is_traced, readable
from khot.checks import check, check_k, check_scores
from khot.primitives.select import hard_mask, ordinary_mask
from khot.primitives.select import largest as largest_indices


def topk_mask(scores: Tensor, k: Number, *, largest: bool = True, dim: int = -1) -> Tensor:
    """The hard top-k as a k-hot mask, without gradient; among equal scores the earlier index wins.

    Args:
        scores: any shape; -inf is never selected, a nan makes its own row nan.
        k: a whole number, or a tensor of whole numbers like the scores without ``dim``.
        largest: ``False`` selects the ``k`` smallest: the same call on ``-scores``, so that +inf is never selected.
        dim: the dimension to select along.

    Returns:
        0/1 mask like ``scores``.

    Example:
        >>> topk_mask(torch.tensor([1.0, 3.0, 2.0, 3.0]), k=2)
        tensor([0., 1., 0., 1.])
    """
    if dim == -1 and largest and (mask := ordinary_mask(scores, k)) is not None:
        return mask
    if type(scores) is not Tensor and (form := form_for("topk_mask", scores)):
        return form(scores, k, largest=largest, dim=dim)
    check(scores, k, dim=dim)
    check_whole_values(k)
    x = scores.detach() if largest else -scores.detach()
    last = dim in (-1, x.ndim - 1)
    count = k.detach().to(x.device).expand(x.movedim(dim, -1).shape[:-1]).unsqueeze(-1) if isinstance(k, Tensor) else int(k)
    return hard_mask(x, count) if last else hard_mask(x.movedim(dim, -1), count).movedim(-1, dim)


def topk_matrix(scores: Tensor, k: int) -> Tensor:
    """The hard top-k as a ``(..., k, n)`` 0/1 matrix, row ``i`` marking the ``i``-th largest; ties to the earlier index.

    As in :func:`topk_mask`, -inf is never marked (the rows for which nothing is left are 0) and a nan makes its own matrix nan.
    """
    check(scores, k, fractional=False)
    index = largest_indices(scores, int(k))
    mark = (scores.detach().gather(-1, index) > -torch.inf).to(scores.dtype)
    one_hot = torch.zeros(*index.shape, scores.shape[-1], dtype=scores.dtype, device=scores.device)
    one_hot = one_hot.scatter(-1, index.unsqueeze(-1), mark.unsqueeze(-1))
    return one_hot.masked_fill(scores.isnan().any(-1)[..., None, None], torch.nan)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The value of ``hard``, the gradient of ``soft``.

    Args:
        hard: any shape; it receives no gradient.
        soft: like ``hard``.

    Returns:
        Like ``hard``: its values, with a gradient that goes to ``soft`` unchanged.

    Example:
        >>> soft = torch.tensor([0.3, 0.7], requires_grad=True)
        >>> straight_through(torch.tensor([0.0, 1.0]), soft)
        tensor([0., 1.], grad_fn=<_ThroughBackward>)
    """
    return through(hard.detach().clone(), soft)


def through(hard: Tensor, soft: Tensor) -> Tensor:
    """:func:`straight_through` for a ``hard`` that nobody else holds: it may become the result itself."""
    if is_traced() or in_forward_mode() or not _alike(hard, soft):
        return hard.detach() + (soft - soft.detach())
    return _apply_through(hard, soft) if is_grad_enabled() and soft.requires_grad else hard


def _alike(hard: Tensor, soft: Tensor) -> bool:
    return hard.shape == soft.shape and hard.dtype is soft.dtype and is_bare(hard) and is_bare(soft)


class _Through(Function):
    """No arithmetic on the way forward or back: the gradient is handed on as it is."""

    @staticmethod
    def forward(ctx: Any, hard: Tensor, soft: Tensor) -> Tensor:
        return hard

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


# What Function.apply does about transforms is settled: there is none, as was looked at above.
_apply_through = super(Function, _Through).apply  # pyright: ignore[reportAttributeAccessIssue]


class Gathered(NamedTuple):
    """The rows that were kept and where they came from."""

    values: Tensor
    indices: Tensor


def gather_topk(x: Tensor, mask: Tensor, k: int, *, dim: int = -2) -> Gathered:
    """The ``k`` items of ``x`` with the largest mask, largest first, equal ones in their order.

    The values are those of ``x``, untouched. A mask that requires a gradient receives one, as if every kept item were multiplied by
    its mask entry and that entry were 1.

    Args:
        x: items along ``dim``, e.g. ``(..., n, d)`` with ``dim=-2``.
        mask: ``x.shape`` up to and including ``dim``, e.g. ``(..., n)``.
        k: how many to keep.
        dim: the dimension of the items in ``x``.

    Returns:
        ``values``: ``x`` with ``k`` items along ``dim``; ``indices``: like ``mask`` with ``k`` entries in its last dimension.

    Example:
        >>> x = torch.arange(8.0).reshape(4, 2)
        >>> gather_topk(x, torch.tensor([0.1, 0.9, 0.0, 1.0]), k=2).values
        tensor([[6., 7.],
                [2., 3.]])
    """
    if type(mask) is not Tensor and (form := form_for("gather_topk", mask)):
        return form(x, mask, k, dim=dim)
    items = check_items(x, mask, dim)
    check_k(k, mask, fractional=False)
    indices = largest_indices(mask, int(k))
    trailing = x.ndim - items - 1
    values = x.gather(items, indices.reshape(*indices.shape, *[1] * trailing).expand(*indices.shape, *x.shape[items + 1 :]))
    if mask.requires_grad:
        kept = mask.gather(-1, indices)
        values = values * through(torch.ones_like(kept), kept).to(x.dtype).reshape(*kept.shape, *[1] * trailing)
    return Gathered(values, indices)


def check_items(x: Tensor, mask: Tensor, dim: int) -> int:
    """Which dimension of ``x`` holds the items; raises where the mask does not belong to them."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be between {-x.ndim} and {x.ndim - 1} for x of shape {tuple(x.shape)}, got {dim}")
    items = dim % x.ndim
    check_scores(mask, name="mask")
    if mask.shape != x.shape[: items + 1]:
        raise ValueError(f"mask must have shape {tuple(x.shape[: items + 1])}, x's shape up to dim={dim}, got {tuple(mask.shape)}")
    return items


def check_whole_values(k: Number) -> None:
    """Raise where ``k`` is no whole number."""
    whole = bool((k == k.round()).all()) if isinstance(k, Tensor) and readable(k) else isinstance(k, Tensor) or k == int(k)
    if not whole:
        raise ValueError(f"k must be a whole number for a hard mask, got {k}; round it first")
