"""The tables of relaxations and designs, and the one door through which arguments pass.

A relaxation is a function of ``(scores, k, tau, **options)`` along the last dimension, written as bare mathematics.
``@relaxation`` files it under a name with its properties and returns the public function: the same body behind
:func:`check`, with ``dim``, half precision and autocast taken care of. Nothing here imports from the rest of the package.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

Number: TypeAlias = float | Tensor  # an int counts as a float to a type checker

_relaxations: dict[str, Relaxation] = {}
_designs: dict[str, Design] = {}
RELAXATIONS: Mapping[str, Relaxation] = MappingProxyType(_relaxations)
DESIGNS: Mapping[str, Design] = MappingProxyType(_designs)

_WIDENED = (torch.float16, torch.bfloat16)
_KINDS = (Tensor, torch.nn.Parameter)
_any_autocast = torch._C._is_any_autocast_enabled
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxation:
    """One row of the table: what a relaxation is called, what it promises, what it costs.

    Every flag is a law that the tests hold the relaxation to. A ``False`` says that the method cannot keep the law.
    """

    name: str
    kind: Literal["mask", "matrix"]
    topk: Callable[..., Tensor]  # public, checked: (scores, k, tau, *, dim, **options) -> like scores
    matrix: Callable[..., Tensor] | None  # public, checked: (scores, k, tau, **options) -> (..., k, n)
    select: Callable[..., Tensor] | None  # unchecked (x, scores, k, tau, **options) -> (..., k, d), where cheaper than matrix @ x
    options: Mapping[str, Any]  # name -> default
    cost: str
    paper: str
    sums_to_k: bool = True
    smooth: bool = True  # continuously differentiable in the scores
    sparse: bool = False  # exact zeros at finite scores
    grad_k: bool = False  # gradient in k, and with it fractional and per-row k
    grad_tau: bool = True
    bounded: bool = True  # entries in [0, 1]
    monotone: bool = True  # a larger score never weighs less
    shift_invariant: bool = True
    hard_limit: bool = True  # tau -> 0 is topk_mask
    scale_free: bool = True  # depends on scores / tau alone, so that huge scores are the hard top-k at any tau
    ties_equal: bool = True  # equal scores weigh the same
    complete: bool = True  # k = n selects everything, as does a k beyond the items that are not excluded
    excludes: bool = True  # -inf excludes an item: weight exactly 0
    infinite: bool = True  # +inf makes an item certain: weight exactly 1
    deterministic: bool = True
    double_backward: bool = True
    forward_mode: bool = True
    compiles: bool = True  # torch.compile takes it as one graph

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True, eq=False)
class Design:
    """One row of the table of sampling designs: fixed-size samples with prescribed inclusion probabilities."""

    name: str
    draw: Callable[..., Tensor]  # unchecked (probs, k, *, generator, **options) -> 0/1 like probs; k is (..., 1)
    options: Mapping[str, Any]
    cost: str
    paper: str
    exact: bool  # E[sample] = probs
    fixed_size: bool = True
    log_prob: bool = False  # the probability of a sample has a closed form that is offered
    positive_joint: bool = True  # every pair has a positive joint probability
    many: bool = False  # draw takes num_samples and prepares once for all of them
    note: str = ""
    extras: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def relaxation(
    name: str,
    *,
    kind: Literal["mask", "matrix"],
    cost: str,
    paper: str,
    mask: Callable[..., Tensor] | None = None,
    select: Callable[..., Tensor] | None = None,
    native_half: bool = False,
    **laws: bool,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """File the decorated body under ``name`` and return it behind the door.

    Args:
        kind: what the body returns, a mask like the scores or a ``(..., k, n)`` matrix.
        mask: for a matrix method, a cheaper body for the sum of the matrix over its rows.
        select: a cheaper body for ``matrix @ x``.
        native_half: the body computes half precision in float32 by itself.
        laws: the flags of :class:`Relaxation`.
    """

    def file(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
        door = functools.partial(_door, name=name, options=_options(body), native_half=native_half)
        if kind == "mask":
            topk, matrix = door(body, kind="mask", fractional=laws.get("grad_k", False)), None
        else:
            matrix = door(body, kind="matrix", fractional=False)
            topk = door(mask or _sum_of_rows(body), kind="mask", fractional=laws.get("grad_k", False))
        _relaxations[name] = Relaxation(
            name=name, kind=kind, topk=topk, matrix=matrix, select=select, options=_options(body), cost=cost, paper=paper, **laws
        )
        return functools.wraps(body)(topk if matrix is None else matrix)

    return file


def design(name: str, *, cost: str, paper: str, exact: bool, **properties: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """File the decorated ``(probs, k, *, generator, **options)`` under ``name`` in the table of designs."""

    def file(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
        options = _options(body)
        options.pop("generator", None)
        many = options.pop("num_samples", None) is not None
        _designs[name] = Design(name=name, draw=body, options=options, cost=cost, paper=paper, exact=exact, many=many, **properties)
        return body

    return file


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
    if _is_plain(scores, k, tau, dim, fractional) and scores.is_floating_point():
        return
    check_scores(scores, dim)
    check_k(k, scores, dim, fractional)
    check_tau(tau, scores, dim)


def _is_plain(scores: Tensor, k: Number, tau: Number, dim: int, fractional: bool) -> bool:
    """Whether this is the ordinary call with two numbers, but for the dtype: the checks below cost as much as a small softmax."""
    if type(scores) is not Tensor:
        return False
    shape = scores.shape
    return (  # pyright: ignore[reportReturnType]
        (type(k) is int or type(k) is float and fractional)
        and (type(tau) is float or type(tau) is int)
        and tau > 0
        and -len(shape) <= dim < len(shape)
        and 0 <= k <= shape[dim]
    )


def check_scores(scores: Tensor, dim: int = -1, name: str = "scores") -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(scores).__name__}; wrap it in torch.as_tensor(...)")
    if not scores.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype, got {scores.dtype}; convert with {name}.float()")
    if scores.ndim == 0:
        raise ValueError(f"{name} must have at least one dimension, got a 0-d tensor; use {name}.unsqueeze(0)")
    if not -scores.ndim <= dim < scores.ndim:
        raise ValueError(f"dim must be between {-scores.ndim} and {scores.ndim - 1} for {name} of shape {tuple(scores.shape)}, got {dim}")


def check_k(k: Number, scores: Tensor, dim: int = -1, fractional: bool = True) -> None:
    n = scores.shape[dim]
    if isinstance(k, Tensor):
        _check_row_shape("k", k, scores, dim)
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
        _check_row_shape("tau", tau, scores, dim)
        if readable(tau) and not bool((tau > 0).all()):
            raise ValueError(f"tau must be positive, got a tensor with minimum {tau.min().item():g}; clamp it or learn its logarithm")
    elif isinstance(tau, bool) or not isinstance(tau, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(tau, Real):
        raise TypeError(f"tau must be a float or a tensor, got {type(tau).__name__}")
    elif not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}; for the hard top-k use hard=True or topk_mask")


def check_options(name: str, given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    for key in given:
        if key not in options:
            known = ", ".join(options) or "none"
            raise TypeError(f"method {name!r} has no option {key!r}; its options: {known}")


def readable(tensor: Tensor) -> bool:
    """Whether the values can be looked at here without waiting for a device or breaking a trace."""
    return not is_compiling() and tensor.is_cpu and is_bare(tensor)


def is_bare(tensor: Tensor) -> bool:
    """Whether this is a tensor itself: not a subclass, and not wrapped by a transform."""
    return type(tensor) in _KINDS and not _is_wrapped(tensor)


def column(value: Number, scores: Tensor) -> Number:
    """A per-row ``k`` or ``tau`` as a ``(..., 1)`` column beside ``(..., n)`` scores; plain numbers stay as they are."""
    if not isinstance(value, Tensor):
        return float(value)
    return value.to(dtype=scores.dtype, device=scores.device).expand(scores.shape[:-1]).unsqueeze(-1)


def _check_row_shape(name: str, value: Tensor, scores: Tensor, dim: int) -> None:
    rows = list(scores.shape)
    del rows[dim]
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be real, got {value.dtype}")
    try:
        fits = torch.broadcast_shapes(value.shape, rows) == torch.Size(rows)
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
    came = f"values from {k.min().item():g} to {k.max().item():g}" if isinstance(k, Tensor) else k
    raise ValueError(f"k must be between 0 and n={n} along dim={dim}, got {came}")


def _options(body: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(body).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _sum_of_rows(matrix: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mask(scores: Tensor, k: int, tau: Number, **options: Any) -> Tensor:
        return matrix(scores, k, tau, **options).sum(-2)

    return mask


def _door(
    body: Callable[..., Tensor],
    *,
    kind: str,
    name: str,
    options: Mapping[str, Any],
    native_half: bool,
    fractional: bool,
) -> Callable[..., Tensor]:
    as_it_is = (torch.float32, torch.float64, *(_WIDENED if native_half else ()))

    def entered(scores: Tensor, k: Number, tau: Number = 1.0, *, dim: int = -1, **given: Any) -> Tensor:
        if dim == -1 and not given and _is_plain(scores, k, tau, dim, fractional) and scores.dtype in as_it_is and not _any_autocast():
            return body(scores, k, tau)  # nothing to check or to convert: the way of nearly every call
        check(scores, k, tau, dim=dim, fractional=fractional)
        check_options(name, given, options)
        if not fractional:
            k = int(k)
        if kind == "matrix" and dim not in (-1, scores.ndim - 1):
            raise ValueError(f"a matrix method works along the last dimension, got dim={dim}; move it with scores.movedim({dim}, -1)")
        if _any_autocast() and torch.is_autocast_enabled(scores.device.type):
            with torch.autocast(scores.device.type, enabled=False):
                return run(scores, k, tau, dim, given)
        return run(scores, k, tau, dim, given)

    def run(scores: Tensor, k: Number, tau: Number, dim: int, given: Mapping[str, Any]) -> Tensor:
        last = dim in (-1, scores.ndim - 1)
        x = scores if last else scores.movedim(dim, -1)
        if not native_half and scores.dtype in _WIDENED:
            out = body(x.float(), k, tau, **given).to(scores.dtype)
        else:
            out = body(x, k, tau, **given)
        return out if last else out.movedim(-1, dim)

    return entered
