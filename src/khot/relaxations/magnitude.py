"""Soft shrinkage to the values of largest magnitude: the permutahedron's projection, of the values themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from khot import kernels
from khot._tensors import Number, column, in_forward_mode, readable, wide_dtype
from khot.checks import door
from khot.relaxations.permutahedron import check_p


def magnitude_topk(x: Tensor, k: Number, tau: Number = 1.0, *, p: float = 4 / 3, dim: int = -1) -> Tensor:
    r"""Soft shrinkage to the ``k`` values of largest magnitude: a relaxation of ``x * topk_mask(x.abs(), k)``.

    Values well inside the top k pass unchanged, those well outside become exactly 0; with :math:`q = p/(p-1)`,

    .. math:: |y_i| = \begin{cases} |x_i| & m_i = 1 \\ |x_i| - t + m_i t & m_i > 0 \\ 0 & \text{else} \end{cases}
              \qquad m_i = \min\Bigl(\frac1t \Bigl(\frac{|x_i| - t}{\tau}\Bigr)_+^{q-1}, 1\Bigr), \quad \textstyle\sum_i m_i = k

    Args:
        x: any shape, finite.
        k: how many to keep, a number or a tensor like ``x`` without ``dim``.
        tau: strength of the regularisation, a number or a tensor like ``k``; the limit 0 is the hard selection.
        p: above 1; the paper's are 4/3 and 2.
        dim: the dimension to select along.

    Returns:
        Like ``x``, with the signs of ``x``.

    Example:
        >>> magnitude_topk(torch.tensor([-5.0, -2.0, 3.0, 1.0]), k=2, tau=0.01)
        tensor([-5., -0., 3., 0.])

    Sander, Puigcerver, Djolonga, Peyre, Blondel 2023, "Fast, differentiable and sparse top-k".
    """
    return _magnitude(x, k, tau, dim=dim, p=p)


def _magnitude_of(x: Tensor, k: Number, tau: Number, *, p: float) -> Tensor:
    m = _power(1 / (check_p(p) - 1))
    k, tau = column(k, x), column(tau, x)
    native = None if in_forward_mode() else kernels.pick("magnitude", x, k, tau)
    found = None if native is None else native(x.detach(), k, tau, m)
    if found is None:
        return _searched(x, k, tau, m)
    y, t = found
    if not (torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in (x, k, tau))):
        return y
    # The formula at the threshold that was found, on the values above it: autograd does the rest.
    size = x.detach().abs()
    at = size.topk(int((size > t).sum(-1).amax())).indices if x.numel() else size.topk(0).indices
    return torch.zeros_like(x).scatter(-1, at, _shrunk(x.gather(-1, at), k, tau, m, t)[0])


def _power(m: float) -> float:
    """A whole number where ``m`` is one to rounding: a whole power costs a tenth of another. A constant, where compilers trace ``p``."""
    for whole in range(1, 17):
        if abs(m - whole) <= 1e-9 * m:
            return whole
    return m


def _searched(x: Tensor, k: Number, tau: Number, m: float) -> Tensor:
    """In plain PyTorch."""
    # Only values above the threshold matter. A guess of how many those are is put to the test.
    few = 12 * math.ceil(min(_largest(k), x.shape[-1])) + 32 if readable(x) else x.shape[-1]
    while 2 * few < x.shape[-1]:
        at = x.detach().abs().topk(few).indices
        part = x.gather(-1, at)
        kept, t = _shrunk(part, k, tau, m)
        if bool((part[..., -1:].abs() <= t).all()):
            return torch.zeros_like(x).scatter(-1, at, kept)
        few *= 4
    return _shrunk(x, k, tau, m)[0]


_magnitude = door(_magnitude_of, name="magnitude_topk", options=None, native_half=False, fractional=True)


def _largest(k: Number) -> float:
    if not isinstance(k, Tensor):
        return k
    return float(k.detach().max()) if k.numel() and readable(k) else math.inf


def _shrunk(x: Tensor, k: Number, tau: Number, m: float, near: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The shrunk values and the threshold of every row, which is searched for unless it is given."""
    size = x.to(wide_dtype(x)).abs()
    scale = torch.as_tensor(tau, dtype=size.dtype, device=size.device)
    t = _magnitude_threshold(size, k, scale, m, near)
    kept = _share(size, t, scale, m)
    shrunk = torch.where(kept == 1, size, torch.where(size > t, size - t + kept * t, 0.0))
    return (shrunk * x.sign()).to(x.dtype), t.detach()


_NEAR = 1e-13  # of k and of t: where shares begin with a power, a right sum alone does not tell where t is


def _share(size: Tensor, t: Tensor, tau: Tensor, m: float) -> Tensor:
    above = size > t
    rise = torch.where(above, size - t, 1.0) / tau  # not 0, where a root has no derivative
    return torch.where(above, (rise**m / t).clamp(max=1.0), 0.0)


def _magnitude_threshold(size: Tensor, k: Number, tau: Tensor, m: float, near: Tensor | None = None) -> Tensor:
    """The ``t`` at which the shares sum to ``k``, with its exact first and second derivatives."""
    t = _search(size.detach(), k.detach() if isinstance(k, Tensor) else k, tau.detach(), m) if near is None else near
    for _ in range(2):  # one Newton step carries the gradient, the second the gradient of the gradient
        excess, slope = _excess(size, k, t, tau, m)
        flat = slope == 0
        t = t + torch.where(flat, 0.0, excess) / torch.where(flat, 1.0, slope)
    return t


def _search(size: Tensor, k: Number, tau: Tensor, m: float) -> Tensor:
    """Newton steps inside a bracket that always holds the root, and bisection where they leave it or crawl."""
    high = size.amax(-1, keepdim=True) if size.shape[-1] else size.new_zeros((*size.shape[:-1], 1))
    low = torch.where(torch.as_tensor(k, dtype=size.dtype, device=size.device) <= 0, high, 0.0)
    t, before = (low + high) / 2, torch.full_like(high, torch.inf)
    looks = readable(size)
    for _ in range(16 * size.element_size() if looks else 8 * size.element_size()):
        excess, slope = _look(size, k, t, tau, m)
        left = excess.abs()
        enough, near = excess >= 0, (left <= _NEAR * k) & (left <= _NEAR * slope * t)
        low, high = torch.where(enough, t, low), torch.where(enough & ~near, high, t)
        there, middle = t + excess / slope, (low + high) / 2
        if looks and bool((near | (middle <= low) | (middle >= high)).all()):
            break
        sound = (there > low) & (there < high) & (left < before / 2)
        t, before = torch.where(sound, there, middle), left
    return high.clamp(min=torch.finfo(size.dtype).tiny)


def _look(size: Tensor, k: Number, t: Tensor, tau: Tensor, m: float) -> tuple[Tensor, Tensor]:
    """:func:`_excess` without gradient, and without ``torch.where``, which takes ten times as long as arithmetic."""
    rise = (size - t).clamp_(min=0).div_(tau)
    moves = rise > 0
    power = rise.clamp(min=torch.finfo(rise.dtype).tiny) ** (m - 1)  # finite at 0 for every m
    share = (power * rise).div_(t)
    slope = power.mul_(m / tau).div_(t).add_(share / t).mul_(moves.logical_and_(share < 1))
    return share.clamp_(max=1).sum(-1, keepdim=True) - k, slope.nan_to_num_(0.0).sum(-1, keepdim=True)


def _excess(size: Tensor, k: Number, t: Tensor, tau: Tensor, m: float) -> tuple[Tensor, Tensor]:
    """By how much the shares sum to more than ``k``, and how fast that falls with ``t``."""
    share = _share(size, t, tau, m)
    moves = (share > 0) & (share < 1)
    slope = torch.where(moves, share * (m / torch.where(moves, size - t, 1.0) + 1 / t), 0.0)
    return share.sum(-1, keepdim=True) - k, slope.sum(-1, keepdim=True)
