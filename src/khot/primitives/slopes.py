"""Division by a temperature whose derivatives stay numbers, however small it is."""

from __future__ import annotations

import torch
from torch import Tensor

from khot._tensors import Number, readable


def over(values: Tensor, tau: Number) -> Tensor:
    r""":math:`v / \tau`, with a derivative in ``tau`` that is 0 where a saturated function of the quotient has slope 0.

    The rule of a division multiplies the slope by :math:`v / \tau^2`, which overflows long before :math:`v / \tau` does, and 0 times
    infinity is nan. Here it is multiplied by the quotient first, which is cut to what the dtype holds.

    Args:
        values: ``(..., n)``.
        tau: a number, or a tensor beside the values.

    Example:
        >>> tau = torch.tensor(1e-30, requires_grad=True)
        >>> torch.autograd.grad(torch.sigmoid(over(torch.tensor(3.0), tau)), tau)
        (tensor(-0.),)
    """
    if not isinstance(tau, Tensor):
        return values / tau
    still, most = tau.detach(), torch.finfo(values.dtype).max
    return (values / still).clamp(-most, most) * (still / tau)


def least(dtype: torch.dtype, power: int = 2) -> float:
    """The least temperature whose ``power`` can be divided by, with room for sums."""
    return 64 * torch.finfo(dtype).tiny ** (1 / power)


def not_less(tau: Number, dtype: torch.dtype, power: int = 2) -> Number:
    """``tau``, or :func:`least` where it is less: for a second division, of places, which are further apart than that or equal."""
    low = least(dtype, power)
    return tau.clamp(min=low) if isinstance(tau, Tensor) else max(tau, low)


def shortened(values: Tensor, tau: Number, dtype: torch.dtype, power: int = 2) -> Tensor:
    """``values`` that were divided by ``tau``, with the derivatives of the :func:`least` temperature where ``tau`` is less.

    They will be divided again, so that ties have a slope of 1 over a ``power`` of ``tau``. One that the dtype cannot hold would meet its
    opposite and become nan.
    """
    still, low = tau.detach() if isinstance(tau, Tensor) else tau, least(dtype, power)
    if not isinstance(still, Tensor):
        enough = still >= low
    else:
        enough = readable(still) and bool((still >= low).all())
    if enough:
        return values
    part = values * (still / not_less(still, dtype, power))
    return values.detach() + torch.where(values.isfinite(), part - part.detach(), 0.0)
