"""How many columns: criteria over a path of sizes, the smallest value is best."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# A residual shorter than this share of the target is rounding: longer models do not improve on it.
EXACT = 1e-12


def _information(penalty: Callable[[float, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    def criterion(loss: np.ndarray, total: np.ndarray, n: float, columns: np.ndarray) -> np.ndarray:
        """``(sizes, outputs)`` from squared residuals ``loss``, squared lengths ``total``, ``n`` samples and the number of ``columns``."""
        floor = EXACT**2 * np.where(total > 0, total, 1.0)
        return n * np.log(np.maximum(loss, floor) / n if n > 0 else floor) + penalty(n, columns)

    return criterion


def _corrected(n: float, columns: np.ndarray) -> np.ndarray:
    """Hurvich & Tsai 1989; a model with about as many columns as samples is never chosen."""
    left = n - columns - 1.0
    return np.where(left > 0, 2.0 * columns * n / np.where(left > 0, left, 1.0), np.inf)


INFORMATION = {
    "aic": _information(lambda n, columns: 2.0 * columns),
    "aicc": _information(_corrected),
    "bic": _information(lambda n, columns: np.log(max(n, 1.0)) * columns),
}
CRITERIA = (*INFORMATION, "elbow", "validation", "stability")
SHARE = 0.3  # of the largest fall of the logarithm of the loss: chosen on every sixth system of dysts, with a seed of its own


def elbow(loss: np.ndarray, total: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The largest size that still makes the loss fall, ``(sizes, outputs)``: as a ratio for each column, by a share of the largest fall.

    For data with little noise, where the error that is left is not random, so that every further column lowers it significantly.
    """
    floor = EXACT**2 * np.where(total > 0, total, 1.0)
    logs = np.log(np.maximum(np.concatenate([np.where(total > 0, total, 1.0)[None], loss]), floor))
    falls = -np.diff(logs, axis=0) / np.maximum(np.diff(np.concatenate([[0], sizes])), 1)[:, None]
    rank = np.arange(len(sizes)).reshape(-1, 1)
    return np.where(falls >= SHARE * falls.max(0), -rank - 1.0, 1.0 + rank)
