r"""Running sums that forget: :math:`y_i = v_i + a_i \, y_{i-1}`."""

from __future__ import annotations

import torch
from torch import Tensor


def decayed_cumsum(values: Tensor, decay: Tensor) -> Tensor:
    r"""``y_i = v_i + a_i y_{i-1}`` along the second-last dimension, in ``log2(n)`` vectorised rounds.

    In every round each partial sum takes in the one that ends where it begins. Nothing is divided and no exponent grows, so that with
    decays in [0, 1] and values of one sign the result is right to a few roundings.

    Args:
        values: ``(..., n, d)``.
        decay: ``(..., n, 1)`` in [0, 1]; the first entry is never used.

    Returns:
        ``(..., n, d)``.

    Example:
        >>> decayed_cumsum(torch.ones(4, 1), torch.full((4, 1), 0.5)).flatten()
        tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    n, reach = values.shape[-2], 1
    while reach < n:
        head, tail = slice(None, reach), slice(reach, None)
        before = slice(None, n - reach)
        values, decay = (
            torch.cat([values[..., head, :], values[..., tail, :] + decay[..., tail, :] * values[..., before, :]], -2),
            torch.cat([decay[..., head, :], decay[..., tail, :] * decay[..., before, :]], -2),
        )
        reach *= 2
    return values
