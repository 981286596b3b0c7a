"""What arguments must hold, and the door through which those of every public function pass.

Tensors whose values cannot be read here (on another device, inside a trace or a transform) pass unread.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, strided

from khot._tensors import HALF, Number, any_autocast, is_dtensor, readable, work_dtype

_LOW, _HIGH = 1e-30, 1e30  # temperatures between these need no look at the dtype

_DTYPES = (torch.float32, torch.float64, *HALF)


def find(table: Mapping[str, Any], name: str, what: str = "method") -> Any:
    """The row called ``name``, or an error that lists the choices."""
    try:
        return table[name]
    except (KeyError, TypeError):  # TypeError: a list, say
        pass
    close = difflib.get_close_matches(str(name), table, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"unknown {what} {name!r}{hint}; choose from {', '.join(sorted(table))}")


def check(scores: Tensor, k: Number, tau: Number = 1.0, *, dim: int = -1, fractional: bool = True) -> None:
    """Raise unless ``(scores, k, tau)`` is something to select from. Tensors that cannot be read here pass."""
    if is_plain(scores, k, tau, dim, fractional) and scores.dtype in _DTYPES:
        return
    check_scores(scores, dim)
    check_k(k, scores, dim, fractional)
    check_tau(tau, scores, dim)


def is_plain(scores: Tensor, k: Number, tau: Number, dim: int, fractional: bool) -> bool:
    """Whether this is the ordinary call with two numbers, but for the dtype: the checks below cost as much as a small softmax."""
    if type(scores) is not Tensor or scores.layout is not strided or scores.is_nested:
        return False
    shape = scores.shape
    return (  # pyright: ignore[reportReturnType]
        (type(k) is int or type(k) is float and fractional)
        and (type(tau) is float or type(tau) is int)
        and _LOW < tau < _HIGH
        and -len(shape) <= dim < len(shape)
        and 0 <= k <= shape[dim]
    )


def check_scores(scores: Tensor, dim: int = -1, name: str = "scores") -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(scores).__name__}; wrap it in torch.as_tensor(...)")
    if is_dtensor(scores):
        raise TypeError(f"{name} must be a plain tensor here, got a DTensor; take this process's part of it with {name}.to_local()")
    if not scores.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype, got {scores.dtype}; convert with {name}.float()")
    if scores.dtype not in _DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {scores.dtype}; convert with {name}.float()")
    if scores.is_nested:
        pad = f"torch.nested.to_padded_tensor({name}, -torch.inf)"
        raise TypeError(f"{name} must not be a nested tensor; pad it with {pad}, which excludes what is padded")
    if scores.layout is not strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {scores.layout}; convert with {name}.to_dense()")
    if scores.ndim == 0:
        raise ValueError(f"{name} must have at least one dimension, got a 0-d tensor; use {name}.unsqueeze(0)")
    if not -scores.ndim <= dim < scores.ndim:
        raise ValueError(f"dim must be between {-scores.ndim} and {scores.ndim - 1} for {name} of shape {tuple(scores.shape)}, got {dim}")


def check_k(k: Number, scores: Tensor, dim: int = -1, fractional: bool = True) -> None:
    n = scores.shape[dim]
    if isinstance(k, Tensor):
        check_per_row("k", k, scores, dim)
        _check_whole(k, fractional)
        if readable(k) and not bool(((k >= 0) & (k <= n)).all()):
            _raise_k(n, dim, k)
        return
    if not isinstance(k, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(k, Real) or isinstance(k, bool):
        raise TypeError(f"k must be an int, a float or a tensor, got {type(k).__name__}")
    _check_whole(k, fractional)
    if not 0 <= k <= n:
        _raise_k(n, dim, k)


def check_tau(tau: Number, scores: Tensor, dim: int = -1) -> None:
    if isinstance(tau, Tensor):
        check_per_row("tau", tau, scores, dim)
        if readable(tau) and not bool((tau > 0).all()):
            raise ValueError(f"tau must be positive, got a tensor with minimum {tau.min().item():g}; clamp it or learn its logarithm")
    elif isinstance(tau, bool) or not isinstance(tau, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(tau, Real):
        raise TypeError(f"tau must be a float or a tensor, got {type(tau).__name__}")
    elif not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}; for the hard top-k use hard=True or topk_mask")


def check_options(name: str, given: Mapping[str, Any], options: Mapping[str, Any] | None, what: str = "method") -> None:
    """Raise for an option that ``name`` does not have; ``options=None`` takes any."""
    for key in given:
        if options is None or key in options:
            continue
        if key in ("hard", "largest"):
            raise TypeError(f"{what} {name!r} has no option {key!r}; soft_topk(scores, k, tau, method={name!r}, {key}=...) has it")
        raise TypeError(f"{what} {name!r} has no option {key!r}; its options: {', '.join(options) or 'none'}")


def check_per_row(name: str, value: Tensor, scores: Tensor, dim: int = -1) -> None:
    """Raise unless ``value`` is real and a scalar or one number per row."""
    items = dim % scores.ndim
    rows = (*scores.shape[:items], *scores.shape[items + 1 :])
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be real, got {value.dtype}")
    try:
        fits = tuple(torch.broadcast_shapes(value.shape, rows)) == rows  # Dynamo before torch 2.7 makes no torch.Size of symbols
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} must be a scalar or of shape {tuple(rows)} (the scores' shape without dim={dim}), got {tuple(value.shape)}"
        )


def _check_whole(k: Number, fractional: bool) -> None:
    if fractional:
        return
    if isinstance(k, Tensor):
        raise TypeError("k must be an int for this method, got a tensor; methods with gradient in k take one, e.g. method='sigmoid'")
    if isinstance(k, float) and not k.is_integer():
        raise ValueError(f"k must be a whole number for this method, got {k}; methods with gradient in k take fractions, e.g. 'sigmoid'")


def _raise_k(n: int, dim: int, k: Number) -> NoReturn:
    if not isinstance(k, Tensor):
        raise ValueError(f"k must be between 0 and n={n} along dim={dim}, got {k}")
    came = f"values from {k.min().item():g} to {k.max().item():g}"
    raise ValueError(
        f"k must be between 0 and n={n} along dim={dim}, got {came}; learn raw with k = n * torch.sigmoid(raw) to keep it inside"
    )


def within_range(tau: Number, scores: Tensor) -> Number:
    """A temperature that the dtype can divide by: beyond these ends nothing changes, but 0 and infinity are not numbers to divide."""
    dtype = work_dtype(scores)
    low, high = torch.finfo(dtype).tiny * 64, torch.finfo(dtype).max / 64
    if isinstance(tau, Tensor):
        return tau.to(dtype).clamp(low, high)
    return min(max(float(tau), low), high) if isinstance(tau, (int, float)) else tau


def door(
    body: Callable[..., Tensor],
    *,
    name: str,
    options: Mapping[str, Any] | None,
    native_half: bool,
    fractional: bool,
    matrix: bool = False,
    reduces: bool = False,
    ordinary: Callable[..., Tensor | None] | None = None,
) -> Callable[..., Tensor]:
    """``body`` for any ``dim``, half precision and autocast, behind the checks.

    Args:
        body: ``(scores, k, tau, **options)`` along the last dimension.
        name: the method's, for its error messages.
        options: the names of the method's options with their defaults; ``None`` for a function that checks its own.
        native_half: the body computes half precision in float32 by itself.
        fractional: whether ``k`` may be a fraction or a tensor.
        matrix: whether the body returns a matrix, which works along the last dimension only.
        reduces: whether the body returns one number per row, so that there is no dimension to move back.
        ordinary: the same for calls that need no check and no conversion; it returns ``None`` for all others.
    """
    as_it_is = (torch.float32, torch.float64, *(HALF if native_half else ()))

    def entered(scores: Tensor, k: Number, tau: Number = 1.0, *, dim: int = -1, **given: Any) -> Tensor:
        if ordinary is not None and dim == -1 and not given and (mask := ordinary(scores, k, tau)) is not None:
            return mask
        if dim == -1 and not given and is_plain(scores, k, tau, dim, fractional) and scores.dtype in as_it_is and not any_autocast():
            return body(scores, k, tau)  # nothing to check or to convert: the path of nearly every call
        check(scores, k, tau, dim=dim, fractional=fractional)
        check_options(name, given, options)
        if not fractional:
            k = int(k)
        if matrix and dim not in (-1, scores.ndim - 1):
            raise ValueError(f"a matrix method works along the last dimension, got dim={dim}; move it with scores.movedim({dim}, -1)")
        if any_autocast() and torch.is_autocast_enabled(scores.device.type):
            with torch.autocast(scores.device.type, enabled=False):
                return run(scores, k, tau, dim, given)
        return run(scores, k, tau, dim, given)

    def run(scores: Tensor, k: Number, tau: Number, dim: int, given: Mapping[str, Any]) -> Tensor:
        last = dim in (-1, scores.ndim - 1)
        x = scores if last else scores.movedim(dim, -1)
        tau = within_range(tau, scores)
        if not native_half and scores.dtype in HALF:
            out = body(x.float(), k, tau, **given).to(scores.dtype)
        else:
            out = body(x, k, tau, **given)
        return out if last or reduces else out.movedim(-1, dim)

    return entered
