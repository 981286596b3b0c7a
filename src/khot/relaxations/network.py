"""Differentiable sorting networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from khot._tensors import Number, column
from khot.primitives.limits import check_size
from khot.primitives.order import descending_order
from khot.primitives.settle import deeper, ordinary, settle_mask, settle_rows
from khot.registry import relaxation

SWAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "logistic": torch.sigmoid,
    "cauchy": lambda gap: torch.atan(gap) / torch.pi + 0.5,
}
NETWORKS = ("bitonic", "odd_even")


class _Layer(NamedTuple):
    """Comparators that act at once: on blocks of wires, the first half against the second (mirrored or not), or on neighbours."""

    block: int  # 0 for neighbours
    turn: int  # mirrored; for neighbours, the first wire


def _bitonic(wires: int) -> Iterator[_Layer]:
    size = 2
    while size <= wires:
        yield _Layer(size, 1)
        for block in (size >> i for i in range(1, size.bit_length() - 1)):
            yield _Layer(block, 0)
        size *= 2


def _layers(kind: str, wires: int) -> list[_Layer]:
    return list(_bitonic(wires)) if kind == "bitonic" else [_Layer(0, i % 2) for i in range(wires)]


def _split(values: Tensor, layer: _Layer) -> tuple[Tensor, Tensor]:
    if layer.block:
        upper, lower = values.unflatten(-1, (-1, layer.block)).chunk(2, -1)
        return upper, lower.flip(-1) if layer.turn else lower
    pairs = (values.shape[-1] - layer.turn) // 2
    upper, lower = values[..., layer.turn : layer.turn + 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1)
    return upper, lower


def _join(upper: Tensor, lower: Tensor, values: Tensor, layer: _Layer) -> Tensor:
    if layer.block:
        return torch.cat([upper, lower.flip(-1) if layer.turn else lower], -1).flatten(-2)
    pairs = torch.stack([upper, lower], -1).flatten(-2)
    return torch.cat([values[..., : layer.turn], pairs, values[..., layer.turn + pairs.shape[-1] :]], -1)


def _mix(values: Tensor, stay: Tensor, layer: _Layer) -> Tensor:
    """Pass vectors ``(..., rows, wires)`` through a layer that leaves a pair in place with weight ``stay`` and swaps it otherwise."""
    upper, lower = _split(values, layer)
    moved = (upper - lower) * (1 - stay.unsqueeze(-2 if not layer.block else -3))
    return _join(upper - moved, lower + moved, values, layer)


def _compare(values: Tensor, tau: Number, swap: str, layer: _Layer) -> tuple[Tensor, Tensor]:
    """What the comparators decide, and the values after them; -inf loses to everything, +inf wins, equal infinities stay."""
    upper, lower = _split(values, layer)
    width = deeper(tau) if layer.block else tau
    real = upper.isfinite() & lower.isfinite()
    gap = torch.where(real, upper, 0.0) - torch.where(real, lower, 0.0)
    stay = torch.where(real, SWAPS[swap](gap / width), (upper >= lower).to(gap.dtype))
    moved = gap * (1 - stay)
    swapped = ~real & (upper < lower)
    high = torch.where(real, upper - moved, torch.where(swapped, lower, upper))
    low = torch.where(real, lower + moved, torch.where(swapped, upper, lower))
    return stay, _join(high, low, values, layer)


class _Run(NamedTuple):
    """A network that has sorted a row."""

    layers: list[_Layer]
    stays: list[Tensor]
    order: Tensor  # which item entered on each wire
    wires: int


def _run(scores: Tensor, tau: Number, network: str, swap: str, presort: bool) -> _Run:
    _check(network, swap)
    n = scores.shape[-1]
    wires = 1 << max(n - 1, 0).bit_length() if network == "bitonic" else n
    layers = _layers(network, wires)
    check_size("network", *scores.shape[:-1], len(layers), wires, what="record of layers")
    order = descending_order(scores) if presort else torch.arange(n, dtype=torch.long, device=scores.device).expand(scores.shape)
    entered = scores.gather(-1, order) if ordinary(scores) else scores.nan_to_num(0.0, torch.inf, -torch.inf).gather(-1, order)
    values = torch.nn.functional.pad(entered, (0, wires - n), value=-torch.inf)
    stays = []
    for layer in layers:
        stay, values = _compare(values, column(tau, scores), swap, layer)
        stays.append(stay)
    return _Run(layers, stays, order, wires)


def _check(network: str, swap: str) -> None:
    if network not in NETWORKS:
        raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got {network!r}")
    if swap not in SWAPS:
        raise ValueError(f"swap must be one of {', '.join(SWAPS)}, got {swap!r}")


def _back(rows: Tensor, run: _Run) -> Tensor:
    """Trace weights ``(..., rows, wires)`` on the outputs back to the items, ``(..., rows, n)``."""
    for layer, stay in zip(reversed(run.layers), reversed(run.stays), strict=True):
        rows = _mix(rows, stay, layer)
    entered = rows[..., : run.order.shape[-1]]
    return torch.zeros_like(entered).scatter(-1, run.order.unsqueeze(-2).expand(entered.shape), entered)


def _mask(scores: Tensor, k: int, tau: Number = 1.0, *, network: str = "bitonic", swap: str = "logistic", presort: bool = True) -> Tensor:
    run = _run(scores, tau, network, swap, presort)
    top = (torch.arange(run.wires, dtype=torch.long, device=scores.device) < k).to(scores.dtype).expand(*scores.shape[:-1], 1, run.wires)
    mask = torch.where(scores == -torch.inf, 0.0, _back(top, run).squeeze(-2).clamp(0, 1))
    left = (scores > -torch.inf).sum(-1, keepdim=True).clamp(max=k)
    # The sum is kept by every comparator, but for rounding.
    return settle_mask(mask * (left / mask.detach().sum(-1, keepdim=True).clamp(min=1e-9)), scores, k)


def _select(
    x: Tensor, scores: Tensor, k: int, tau: Number = 1.0, *, network: str = "bitonic", swap: str = "logistic", presort: bool = True
) -> Tensor:
    if not ordinary(scores):
        return network_matrix(scores, k, tau, network=network, swap=swap, presort=presort) @ x
    run = _run(scores, tau, network, swap, presort)
    columns = x.gather(-2, run.order.unsqueeze(-1).expand(x.shape)).mT
    columns = torch.nn.functional.pad(columns, (0, run.wires - x.shape[-2]))
    for layer, stay in zip(run.layers, run.stays, strict=True):
        columns = _mix(columns, stay, layer)
    return columns[..., :k].mT


@relaxation(
    "network",
    kind="matrix",
    cost="O(n log^2 n); matrix O(nk log^2 n)",
    paper="Petersen, Borgelt, Kuehne, Deussen 2021, 2022",
    mask=_mask,
    select=_select,
    smooth=False,
    monotone=False,
    ties_equal=False,
)
def network_matrix(
    scores: Tensor, k: int, tau: Number = 1.0, *, network: str = "bitonic", swap: str = "logistic", presort: bool = True
) -> Tensor:
    r"""A sorting network whose comparators swap softly.

    .. math:: \begin{pmatrix} a' \\ b' \end{pmatrix} = \begin{pmatrix} \alpha & 1 - \alpha \\ 1 - \alpha & \alpha \end{pmatrix}
              \begin{pmatrix} a \\ b \end{pmatrix}, \quad \alpha = F((a - b) / \tau)

    The product of all comparators is doubly stochastic. Traced back from the first k outputs, the mask needs one vector and the
    matrix k of them.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature of every comparator, a number or ``(...)``.
        network: ``"bitonic"``, in log2(n) (log2(n) + 1) / 2 layers, or ``"odd_even"``, in n layers of neighbours.
        swap: ``"logistic"``, or ``"cauchy"``, whose gradient does not vanish as fast.
        presort: let the scores enter in their order, so that the result does not depend on where an item stands. The published
            networks take them as they come: smooth in the scores, but not equivariant.

    Returns:
        ``(..., k, n)``, rows that sum to 1, columns that sum to at most 1.

    Example:
        >>> network_matrix(torch.tensor([1.0, 3.0]), k=2)
        tensor([[0.1192, 0.8808],
                [0.8808, 0.1192]])
    """
    run = _run(scores, tau, network, swap, presort)
    check_size("network", *scores.shape[:-1], k, run.wires, fix="soft_topk and select_topk need no matrix")
    first = torch.eye(k, run.wires, dtype=scores.dtype, device=scores.device).expand(*scores.shape[:-1], k, run.wires)
    return settle_rows(_back(first, run), scores)
