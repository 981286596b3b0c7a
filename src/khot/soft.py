"""The soft verbs: look up the relaxation, call it, harden if asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from khot._tensors import Number, any_autocast, form_for
from khot.checks import check_scores, door, find, is_plain
from khot.hard import through, topk_mask, topk_matrix
from khot.primitives.threshold.autograd import solve_hard
from khot.registry import RELAXATIONS, Relaxation, find_method


def soft_topk(
    scores: Tensor,
    k: Number,
    tau: Number = 1.0,
    *,
    method: str | Callable[..., Tensor] = "sigmoid",
    hard: bool = False,
    largest: bool = True,
    dim: int = -1,
    **options: Any,
) -> Tensor:
    r"""A differentiable mask of the ``k`` largest scores.

    Args:
        scores: any shape; -inf excludes an item, +inf makes it certain.
        k: how many to select along ``dim``; an int, a float, or a tensor like the scores without ``dim``.
        tau: temperature, a number or a tensor like ``k``; it divides the scores.
        method: a name in :data:`khot.RELAXATIONS`, or a function ``(scores, k, tau, **options) -> mask`` along the last dimension.
        hard: return the k-hot mask with the gradient of the soft one; a fractional ``k`` is rounded for the hard value.
        largest: ``False`` selects the ``k`` smallest: the same call on ``-scores``, so that +inf excludes an item.
        dim: the dimension to select along.
        options: the method's own.

    Returns:
        Mask like ``scores``, in [0, 1], that sums to ``k`` along ``dim`` (where the method's row says so).

    Example:
        >>> scores = torch.tensor([1.0, 4.0, 2.0, 3.0])
        >>> soft_topk(scores, k=2, tau=0.5)
        tensor([0.0474, 0.9526, 0.2689, 0.7311])
        >>> soft_topk(scores, k=2, hard=True)
        tensor([0., 1., 0., 1.])
        >>> soft_topk(scores, k=1, hard=True, largest=False)
        tensor([1., 0., 0., 0.])
    """
    if dim == -1 and largest and not options and isinstance(method, str):
        ordinary = find_method(method).ordinary
        if ordinary is not None and (mask := ordinary(scores, k, tau, hard)) is not None:
            return mask
    if type(scores) is not Tensor and (form := form_for("soft_topk", scores)):
        return form(scores, k, tau, method=method, hard=hard, largest=largest, dim=dim, **options)
    if not largest:
        scores = _negative(scores)
    if hard and scores.is_cuda and isinstance(method, str):
        at_once = _at_once(find_method(method), scores, k, tau, dim, options)
        if at_once is not None:
            return at_once
    topk = find_method(method).topk if isinstance(method, str) else _own(method)
    soft = topk(scores, k, tau, dim=dim, **options)
    if not hard:
        return soft
    whole = k.detach().round() if isinstance(k, Tensor) else round(k)
    return through(topk_mask(scores, whole, dim=dim), soft)


def _at_once(row: Relaxation, scores: Tensor, k: Number, tau: Number, dim: int, options: dict[str, Any]) -> Tensor | None:
    """The hard mask with the soft gradient by one kernel, where there is one and nothing to check or to convert."""
    if row.family is None or options or dim not in (-1, scores.ndim - 1) or any_autocast() or not is_plain(scores, k, tau, dim, True):
        return None
    assert not isinstance(k, Tensor) and not isinstance(tau, Tensor)
    return solve_hard(scores, float(k), float(tau), row.family())


def soft_topk_matrix(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    method: str = "softrank",
    hard: bool = False,
    largest: bool = True,
    **options: Any,
) -> Tensor:
    r"""Soft selection one item at a time: row ``i`` weighs the items for the place of the ``i``-th largest.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature.
        method: a name in :data:`khot.RELAXATIONS` whose kind is ``matrix``. The default is the one that learns best from its own
            gradient in ``python -m bench gradient``.
        hard: return the 0/1 matrix of the sorted top-k with the gradient of the soft one.
        largest: ``False`` gives the places of the ``k`` smallest, smallest first.
        options: the method's own.

    Returns:
        ``(..., k, n)``, non-negative, rows that sum to 1.

    Example:
        >>> soft_topk_matrix(torch.tensor([3.0, 1.0, 2.0]), k=2, tau=0.1, method="softsort")
        tensor([[9.9995e-01, 2.0611e-09, 4.5398e-05],
                [4.5396e-05, 4.5396e-05, 9.9991e-01]])
    """
    if not largest:
        scores = _negative(scores)
    soft = _find_matrix(method).matrix(scores, k, tau, **options)
    return through(topk_matrix(scores, k), soft) if hard else soft


def _find_matrix(method: str) -> Any:
    """The row of a method that has a matrix, or an error that lists those."""
    if isinstance(method, str) and method in RELAXATIONS:
        row = find_method(method)
        if row.matrix is not None:
            return row
    return _no_matrix(method)


def _no_matrix(method: Any) -> NoReturn:
    rows = {name: row for name, row in RELAXATIONS.items() if row.matrix is not None}
    if isinstance(method, str):
        find(rows, method, "matrix method")
    raise TypeError(
        f"method must be the name of a matrix method, got {method!r}; choose from {', '.join(sorted(rows))}. "
        "A function of your own that returns a matrix needs no verb: call it; soft_topk takes one that returns a mask"
    )


def _negative(scores: Tensor) -> Tensor:
    check_scores(scores)  # some dtypes have no negative
    return -scores


def _own(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A user's function behind the same door as the table's."""
    if not callable(method):
        raise TypeError(f"method must be a name in khot.RELAXATIONS or a function (scores, k, tau, **options), got {method!r}")
    name = getattr(method, "__name__", "method")

    def body(scores: Tensor, k: Number, tau: Number, **options: Any) -> Tensor:
        mask = method(scores, k, tau, **options)
        if mask.shape != scores.shape:
            raise ValueError(f"method {name!r} must return a mask of the scores' shape {tuple(scores.shape)}, got {tuple(mask.shape)}")
        return mask

    return door(body, name=name, options=None, native_half=False, fractional=True)
