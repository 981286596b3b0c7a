"""The tables of relaxations and designs.

A relaxation is a function of ``(scores, k, tau, **options)`` along the last dimension, written as bare mathematics.
``@relaxation`` files it under a name with its properties and returns the public function: the same body behind
:func:`khot.checks.door`, with ``dim``, half precision and autocast taken care of. Below this file are only the checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, ParamSpec

from torch import Tensor

from khot._record import record
from khot._settle import settled_mask, settled_matrix, settled_select
from khot._tensors import Number
from khot.checks import door, find

P = ParamSpec("P")

_relaxations: dict[str, Relaxation] = {}
_designs: dict[str, Design] = {}
RELAXATIONS: Mapping[str, Relaxation] = MappingProxyType(_relaxations)
DESIGNS: Mapping[str, Design] = MappingProxyType(_designs)


@record
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
    family: Callable[..., Any] | None = None  # (**options) -> Family, for a method that is a threshold family
    ordinary: Callable[..., Tensor | None] | None = None  # (scores, k, tau, hard) -> mask, or None: see there
    sums_to_k: bool = True
    smooth: bool = True  # continuously differentiable in the scores
    sparse: bool = False  # exact zeros at finite scores
    grad_k: bool = False  # gradient in k, and with it fractional and per-row k
    grad_tau: bool = True
    bounded: bool = True  # entries in [0, 1]
    monotone: bool = True  # a larger score never weighs less
    shift_invariant: bool = True
    hard_limit: bool = True  # tau -> 0 is topk_mask
    flat_limit: bool = True  # tau -> infinity is the constant k / n
    scale_free: bool = True  # depends on scores / tau alone, so that huge scores are the hard top-k at any tau
    ties_equal: bool = True  # equal scores weigh the same
    complete: bool = True  # k = n selects everything, as does a k beyond the items that are not excluded
    excludes: bool = True  # -inf excludes an item: weight exactly 0
    infinite: bool = True  # +inf makes an item certain: weight exactly 1
    deterministic: bool = True
    double_backward: bool = True
    forward_mode: bool = True
    compiles: bool = True  # torch.compile takes it as one graph
    exports: bool = True  # torch.export takes it with a dynamic length

    def __str__(self) -> str:
        return self.name


@record
class Design:
    """One row of the table of sampling designs: fixed-size samples with prescribed inclusion probabilities."""

    name: str
    draw: Callable[..., Tensor]  # unchecked (probs, k, *, generator, **options) -> 0/1 like probs; k is (..., 1)
    options: Mapping[str, Any]
    cost: str
    paper: str
    exact: bool  # E[sample] = probs
    fixed_size: bool = True
    log_prob: Callable[[Tensor, Tensor], Tensor] | None = None  # (probs, sample) -> (...), where the probability has a closed form
    positive_joint: bool = True  # every pair has a positive joint probability
    many: bool = False  # draw takes num_samples and prepares once for all of them
    vmaps: bool = True  # draws inside torch.func.vmap, with randomness "different" and "same"
    compiles: bool = True  # torch.compile takes it as one graph, and fake tensors pass
    note: str = ""
    # (probs, k, *, generator, **options) -> 0/1 like probs, or None where draw has to do it: takes any k that the rows nearly sum to,
    # fractions too, and makes a row with a nan nan
    draw_soft: Callable[..., Tensor | None] | None = None

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
    special: Callable[..., Tensor] | None = None,
    family: Callable[..., Any] | None = None,
    ordinary: Callable[..., Tensor | None] | None = None,
    native_half: bool = False,
    **laws: bool,
) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """File the decorated body under ``name`` and return it behind the door, with the body's own signature.

    The body of a mask names ``dim`` in its signature, so that ``help`` and editors show it; the door moves that dimension last
    and the body always works along the last one.

    Args:
        kind: what the body returns, a mask like the scores or a ``(..., k, n)`` matrix.
        mask: for a matrix method, a cheaper body for the sum of the matrix over its rows.
        select: a cheaper body for ``matrix @ x``.
        special: the same body with ``among=``, for scores that are not all finite (:mod:`khot._settle`). Without it the body settles
            infinities and nan itself. ``mask`` and ``select`` name ``among`` in their own signature, or settle them too.
        family: for a threshold family, how it is made from the method's options.
        ordinary: for a mask, a shorter way for the ordinary call without options, which returns ``None`` for every other.
        native_half: the body computes half precision in float32 by itself.
        laws: the flags of :class:`Relaxation`.
    """

    def file(body: Callable[P, Tensor]) -> Callable[P, Tensor]:
        options = _options(body)
        enter = functools.partial(door, name=name, options=options, native_half=native_half)
        fractional = laws.get("grad_k", False)
        if kind == "mask":
            topk, matrix = enter(settled_mask(body, special) if special else body, fractional=fractional, ordinary=ordinary), None
        else:
            rows = settled_matrix(body, special)
            topk = enter(settled_mask(mask or _sum_of_rows(rows)), fractional=fractional)
            matrix = enter(rows, fractional=False, matrix=True)
        _relaxations[name] = Relaxation(
            name=name,
            kind=kind,
            topk=topk,
            matrix=matrix,
            select=select and settled_select(select),
            options=options,
            cost=cost,
            paper=paper,
            family=family,
            ordinary=ordinary,
            **laws,
        )
        return functools.wraps(body)(topk if matrix is None else matrix)

    return file


def design(name: str, *, cost: str, paper: str, exact: bool, **properties: Any) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """File the decorated ``(probs, k, *, generator, **options)`` under ``name`` in the table of designs."""

    def file(body: Callable[P, Tensor]) -> Callable[P, Tensor]:
        options = _options(body)
        options.pop("generator", None)
        many = options.pop("num_samples", None) is not None
        _designs[name] = Design(name=name, draw=body, options=options, cost=cost, paper=paper, exact=exact, many=many, **properties)
        return body

    return file


def find_method(name: str) -> Relaxation:
    """The row of a relaxation, or an error that lists the choices."""
    # The dict itself: dynamo before torch 2.7 cannot index a mapping proxy.
    return _relaxations[name] if type(name) is str and name in _relaxations else find(_relaxations, name, "method")


def find_design(name: str) -> Design:
    """The row of a design, or an error that lists the choices."""
    return find(_designs, name, "design")


def _options(body: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments, all of which have a default; read from the function, as ``inspect.signature`` takes its time."""
    return {name: default for name, default in (body.__kwdefaults__ or {}).items() if name != "dim"}


def _sum_of_rows(matrix: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mask(scores: Tensor, k: int, tau: Number, **options: Any) -> Tensor:
        return matrix(scores, k, tau, **options).sum(-2)

    return mask
