r"""The squashing function of the Tsallis entropy for one ``a = alpha - 1`` or one per row.

Its inverse is, up to a constant, a difference of two Box-Cox powers :math:`B(p) = (p^a - 1)/a`, which become logarithms at ``a = 0``:

.. math:: u = 2^{-a} \bigl(B(p) - B(1 - p)\bigr) .

For ``a > 0`` the function reaches 0 and 1, at a distance :math:`2^{-a}/a` from the middle; then ``u`` is measured from the lower end,
which keeps the digits of small values. Nearer to ``a = 0`` that end is too far away, and below it is infinite: there ``u`` is measured
from the middle. A common constant in ``u`` only moves the threshold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from khot.kernels.curve import Curve, fit
from khot.primitives.threshold.family import Family, inside_only

FOOT = 0.01  # from here on u is measured from the lower end
_ZERO = 1e-30  # stands for an a of 0: expm1 and log1p are exact to the last digit there
_NUM_ITERS = 10  # of Newton: enough for float64 at every a from -1 to 9
_FAR = 1e300  # u beyond it counts as infinite
_LEAST_TABLED, _MOST_TABLED = 0.125, 2.0  # below the first the tail turns too sharply for the native table


def tsallis_family(a: Any, alpha: float = 0.0) -> Family:
    """``a`` in (-1, 9], a number or a ``(..., 1)`` column: then the family fits the rows that the column stands beside, in one piece."""

    def f(u: Tensor) -> Tensor:
        up, tail = _by_region(u.double(), a.double() if isinstance(a, Tensor) else a, _from_foot, _from_middle)
        return torch.where(up, 1 - tail.to(u.dtype), tail.to(u.dtype))

    def slope(y: Tensor) -> Tensor:
        return inside_only(y, lambda p: 2**a / (p ** (a - 1) + (1 - p) ** (a - 1)))

    def entropy(y: Tensor) -> Tensor:
        return inside_only(y, lambda p: -(p * _power(p, a) + (1 - p) * _power(1 - p, a)) / (2**a * (a + 1)))

    kernel, curve = _native(a)
    return Family(
        name="entmax",
        kernel=kernel,
        f=f,
        inverse=lambda y: inverse(y, a),
        slope=slope,
        entropy=entropy,
        smooth=False,
        alpha=alpha,
        curve=curve,
    )


def _native(a: Any) -> tuple[str, Callable[[], Curve] | None]:
    """The name of the native code for this ``a``, and what it wants besides; the table is made when it is first asked for."""
    if isinstance(a, Tensor) or not _LEAST_TABLED <= a <= _MOST_TABLED:
        return "none", None
    if a == 0.5:
        return "entmax15", lambda: Curve(a * 2**a)
    return "entmax", functools.partial(_table, a)


@functools.cache
def _table(a: float) -> Curve:
    return fit(a, a * 2**a, lambda rise: _log_tail(rise, a))


def _log_tail(rise: Tensor, a: float) -> Tensor:
    """log2 of :func:`_tail`, also where that is too small for a number."""
    return _tail_above(rise, a).log2() if a > 1 else _power_below(rise, a).log2() / a


def inverse(y: Tensor, a: Any) -> Tensor:
    """The ``u`` at which the function is ``y``."""

    def of_foot(y: Tensor, a: Any) -> tuple[Tensor]:
        return ((y**a - torch.expm1(a * torch.log1p(-y))) / (a * 2**a),)

    def of_middle(y: Tensor, a: Any) -> tuple[Tensor]:
        return ((_power(y, a) - torch.expm1(a * torch.log1p(-y)) / a) / 2**a,)

    return _by_region(y, a, of_foot, of_middle)[0]


def inverse_in_a(y: Tensor, a: Tensor) -> Tensor:
    """The derivative in ``a`` of ``u`` measured from the middle, and 0 at both ends, where the mask does not move."""

    def inside(p: Tensor) -> Tensor:
        log_p, log_q = p.log(), torch.log1p(-p)
        u = log_p * _ratio(a * log_p) - log_q * _ratio(a * log_q)
        change = log_p.square() * _curve(a * log_p) - log_q.square() * _curve(a * log_q)
        return (change - u * torch.full_like(a, 2.0).log()) / 2**a

    return inside_only(y, inside)


def _by_region(x: Tensor, a: Any, foot: Callable[..., tuple[Tensor, ...]], middle: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The results of ``foot`` where ``a`` is large enough, and of ``middle`` elsewhere."""
    if not isinstance(a, Tensor):
        return foot(x, a) if a >= FOOT else middle(x, a if abs(a) > _ZERO else _ZERO)
    near = torch.where(a.abs() < _ZERO, _ZERO, a).clamp(max=FOOT)
    pairs = zip(foot(x, a.clamp(min=FOOT)), middle(x, near), strict=True)
    return tuple(torch.where(a >= FOOT, at_foot, at_middle) for at_foot, at_middle in pairs)


def _power(p: Tensor, a: Any) -> Tensor:
    """``(p^a - 1) / a``."""
    return torch.expm1(a * p.log()) / a


def _ratio(x: Tensor) -> Tensor:
    """``expm1(x) / x``."""
    return _by_series(x, lambda n: 1 / (n + 1), lambda x: torch.expm1(x) / x)


def _curve(x: Tensor) -> Tensor:
    """``(x e^x - expm1(x)) / x^2``, the derivative of :func:`_ratio`."""
    return _by_series(x, lambda n: 1 / (n + 2), lambda x: (x * x.exp() - torch.expm1(x)) / x.square())


def _by_series(x: Tensor, weight: Callable[[int], float], formula: Callable[[Tensor], Tensor]) -> Tensor:
    """``formula(x)``, and near 0, where that or its derivatives would lose digits, ``sum_n weight(n) x^n / n!``."""
    small = x.abs() < 0.5
    little, factor, series = torch.where(small, x, 0.0), torch.ones_like(x), torch.full_like(x, weight(0))
    for n in range(1, 15):
        factor = factor * little / n
        series = series + weight(n) * factor
    return torch.where(small, series, formula(torch.where(small, 1.0, x)))


def _from_foot(u: Tensor, a: Any) -> tuple[Tensor, Tensor]:
    """Whether ``y`` is above 1/2, and the smaller of ``y`` and ``1 - y``."""
    rise = u * (a * 2**a)  # 0 at the lower end, 2 at the upper
    return rise >= 1, _tail(torch.minimum(rise, 2 - rise).clamp(min=0.0), a)


def _tail(rise: Tensor, a: Any) -> Tensor:
    """The ``q`` in [0, 1/2] with ``q^a + 1 - (1-q)^a = rise``, ``rise`` in [0, 1]."""
    if isinstance(a, Tensor):
        return torch.where(a > 1, _tail_above(rise, a.clamp(min=1.0)), _tail_below(rise, a.clamp(max=1.0)))
    if a == 0.5:
        s = 1 - rise
        return (rise * (2 - rise)).square() / (2 * (1 + s * (2 - s * s).sqrt()))
    return _tail_above(rise, a) if a > 1 else _tail_below(rise, a)


def _tail_below(rise: Tensor, a: Any) -> Tensor:
    return _power_below(rise, a) ** (1 / a)


def _power_below(rise: Tensor, a: Any) -> Tensor:
    """``q^a`` for ``a <= 1``: Newton in ``z = q^a`` on a convex function with slopes from 1 to 2, from the right: it never overshoots."""
    half = torch.as_tensor(0.5**a, dtype=rise.dtype, device=rise.device)
    z = torch.minimum(rise, half)
    for _ in range(_NUM_ITERS):
        q = z ** (1 / a)
        rest = torch.expm1(a * torch.log1p(-q))
        z = (z - (z - rest - rise) / (1 + (1 + rest) / (1 - q) * q / z.clamp(min=1e-300))).clamp(min=0.0)
    return z


def _tail_above(rise: Tensor, a: Any) -> Tensor:
    """For ``a > 1``: the same in ``z = 1 - (1-q)^a``; the function ``z + q^a`` is convex in it, with slopes between 1 and 2."""
    most = torch.as_tensor(1 - 0.5**a, dtype=rise.dtype, device=rise.device)
    z = torch.minimum(rise, most)
    for _ in range(_NUM_ITERS):
        q = -torch.expm1(torch.log1p(-z) / a)
        z = (z - (z + q**a - rise) / (1 + (q / (1 - q)) ** (a - 1))).clamp(min=0.0)
    return -torch.expm1(torch.log1p(-z) / a)


def _from_middle(u: Tensor, a: Any) -> tuple[Tensor, Tensor]:
    """The same for ``a`` below 1, measured from the middle: Newton in ``z = B(q)``; ``z - B(1 - q)`` is convex in it, with slopes
    between 1 and 2."""
    far = (u.abs() * 2**a).clamp(max=_FAR)
    middle = torch.as_tensor((0.5**a - 1) / a, dtype=u.dtype, device=u.device)
    z = torch.minimum(-far, middle)
    for _ in range(_NUM_ITERS):
        q = _unpower(z, a)
        rest = torch.expm1(a * torch.log1p(-q)) / a
        z = z - (z - rest + far) / (1 + (q / (1 - q)) ** (1 - a))
    return u >= 0, _unpower(z, a).clamp(max=0.5).masked_fill(u.isinf(), 0.0)


def _unpower(z: Tensor, a: Any) -> Tensor:
    """The ``q`` with ``(q^a - 1) / a = z``; 0 where there is none."""
    return torch.exp(torch.log1p((a * z).clamp(min=-1.0)) / a)
