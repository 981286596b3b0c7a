"""The native tournament and weighted sums, called through ctypes, for tensors that hold their own memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from khot._tensors import Number
from khot.kernels import register
from khot.kernels.cpu import LIBRARY, dense, per_row, pointers
from khot.kernels.order import DTYPES, INDEX, POINTER, REAL, WHOLE, Pair, done, num_rows, takes

_library: Any = LIBRARY


def play(scores: Tensor, k: int, rounds: int, tau: Number, boost: float, power: bool) -> tuple[Tensor, Tensor]:
    """Successive halving of every row.

    Args:
        scores: ``(..., n)``.
        k: places, positive.
        rounds: the least with ``k 2^rounds >= n``.
        tau: a number or a ``(..., 1)`` column.
        boost: the gain of a duel.
        power: whether duels are softmaxes over powers of 20.

    Returns:
        The items of each place, neighbours meeting first, and their weights, both ``(..., k, 2^rounds)``. The best, where they meet
        nobody in the first round, meet themselves, with weight 0.
    """
    scores = dense(scores)
    leaves = torch.empty(*scores.shape[:-1], k, 1 << rounds, dtype=torch.long, device=scores.device)
    weight = torch.empty(leaves.shape, dtype=scores.dtype, device=scores.device)
    tau_rows, tau = per_row(tau, scores)
    code = _library.khot_tournament_forward(
        DTYPES[scores.dtype], scores.data_ptr(), *pointers(tau_rows), tau, boost, power, leaves.data_ptr(), weight.data_ptr(),
        num_rows(scores), scores.shape[-1], k, rounds, torch.get_num_threads(),
    )  # fmt: skip
    done(code)
    return leaves, weight


def play_backward(grad: Tensor, scores: Tensor, leaves: Tensor, tau: Number, boost: float, power: bool) -> tuple[Tensor, Tensor]:
    """The gradients in the scores and, as a float64 column, in tau, from that in the weights."""
    scores, grad = dense(scores), dense(grad)
    out = torch.empty_like(scores)
    grad_tau = torch.empty(*scores.shape[:-1], 1, dtype=torch.float64, device=scores.device)
    tau_rows, tau = per_row(tau, scores)
    k, rounds = leaves.shape[-2], leaves.shape[-1].bit_length() - 1
    code = _library.khot_tournament_backward(
        DTYPES[scores.dtype], scores.data_ptr(), *pointers(tau_rows), tau, boost, power, leaves.data_ptr(), grad.data_ptr(),
        out.data_ptr(), grad_tau.data_ptr(), num_rows(scores), scores.shape[-1], k, rounds, torch.get_num_threads(),
    )  # fmt: skip
    done(code)
    return out, grad_tau


def collect(x: Tensor, weight: Tensor, items: Tensor) -> Tensor:
    """``(..., n, d), (..., k, s), (..., k, s) -> (..., k, d)``: the sum of ``weight_s x[items_s]`` over every bag."""
    x, weight, items = dense(x), dense(weight), dense(items)
    out = torch.empty(*items.shape[:-1], x.shape[-1], dtype=x.dtype, device=x.device)
    code = _library.khot_bags_forward(
        DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), items.data_ptr(), out.data_ptr(), *_bags(x, items), torch.get_num_threads()
    )
    done(code)
    return out


def collect_backward(
    grad: Tensor, x: Tensor, weight: Tensor, items: Tensor, *, grad_x: bool, grad_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients asked for; no item may stand in two bags."""
    x, weight, items, grad = dense(x), dense(weight), dense(items), dense(grad)
    blank = torch.empty_like if items.numel() else torch.zeros_like
    out_x, out_weight = blank(x) if grad_x else None, blank(weight) if grad_weight else None
    code = _library.khot_bags_backward(
        DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), items.data_ptr(), grad.data_ptr(), *pointers(out_x, out_weight),
        *_bags(x, items), torch.get_num_threads(),
    )  # fmt: skip
    done(code)
    return out_x, out_weight


def _bags(x: Tensor, items: Tensor) -> tuple[int, int, int, int, int]:
    n, d = x.shape[-2:]
    k, size = items.shape[-2:]
    return items.numel() // (k * size) if items.numel() else 0, n, d, k, size


if LIBRARY:
    _library.khot_tournament_forward.argtypes = [
        WHOLE, POINTER, POINTER, REAL, REAL, WHOLE, POINTER, POINTER, INDEX, INDEX, INDEX, WHOLE, WHOLE
    ]  # fmt: skip
    _library.khot_tournament_backward.argtypes = [
        WHOLE, POINTER, POINTER, REAL, REAL, WHOLE, *4 * [POINTER], INDEX, INDEX, INDEX, WHOLE, WHOLE
    ]  # fmt: skip
    _library.khot_bags_forward.argtypes = [WHOLE, *4 * [POINTER], *5 * [INDEX], WHOLE]
    _library.khot_bags_backward.argtypes = [WHOLE, *6 * [POINTER], *5 * [INDEX], WHOLE]
    register("tournament", takes, Pair(play, play_backward))
    register("bags", takes, Pair(collect, collect_backward))
