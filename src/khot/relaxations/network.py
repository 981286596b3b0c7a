"""Differentiable sorting networks."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from khot._settle import Among
from khot._tensors import Number, column, is_exporting
from khot.primitives.limits import check_size
from khot.primitives.order import descending_order
from khot.primitives.slopes import over
from khot.registry import relaxation

_TINY = 1e-30  # keeps the root in phi away from 0


def _phi(gap: Tensor) -> Tensor:
    """``gap / |gap|^(1/4)``: small differences enlarged, large ones reduced."""
    return gap * (gap.abs() + _TINY) ** -0.25


def _optimal(gap: Tensor) -> Tensor:
    """Steepest in the middle, with the tails ``1 / (16 gap)`` of the smallest possible error."""
    far = gap.abs() > 0.25
    tail = 1 / (16 * torch.where(far, gap, 1.0))
    return torch.where(far, (gap > 0).to(gap.dtype) - tail, gap + 0.5)


SWAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "logistic": torch.sigmoid,
    "logistic_phi": lambda gap: torch.sigmoid(_phi(gap)),
    "gaussian": torch.special.ndtr,
    "cauchy": lambda gap: torch.atan(gap) / torch.pi + 0.5,
    "reciprocal": lambda gap: 0.5 + gap / (1 + 2 * gap.abs()),
    "optimal": _optimal,
}
NETWORKS = ("bitonic", "odd_even")


class _Layer(NamedTuple):
    """Comparators that act at once: on blocks of wires, the first half against the second (mirrored or not), or on neighbours.

    In the last block, which may be short, wires without a partner pass. That is the network of the next power of two without the
    wires behind the last one: what would stand there is less than everything, and never moves.
    """

    block: int  # 0 for neighbours
    turn: int  # mirrored; for neighbours, the first wire


def _bitonic(wires: int) -> Iterator[_Layer]:
    size = 2
    while size < 2 * wires:
        yield _Layer(size, 1)
        for block in (size >> i for i in range(1, size.bit_length() - 1)):
            yield _Layer(block, 0)
        size *= 2


def _layers(kind: str, wires: int) -> list[_Layer]:
    return list(_bitonic(wires)) if kind == "bitonic" else [_Layer(0, i % 2) for i in range(wires)]


class _Parts(NamedTuple):
    """The wires of a layer: whole blocks, and the last block in three parts, of which the two outer ones or the last two meet."""

    upper: Tensor  # (..., pairs)
    lower: Tensor  # (..., pairs), in the order of their partners
    whole: int  # blocks
    tail: Tensor  # (..., wires of the last block)


def _split(values: Tensor, layer: _Layer) -> _Parts:
    block, half = layer.block or 2, max(layer.block // 2, 1)
    first = layer.turn if not layer.block else 0
    whole = (values.shape[-1] - first) // block
    blocks = values[..., first : first + whole * block].unflatten(-1, (whole, block))
    upper, lower = blocks[..., :half], blocks[..., half:]
    lower = lower.flip(-1) if layer.block and layer.turn else lower
    tail = values[..., first + whole * block :]
    if not layer.block or tail.shape[-1] <= half:
        return _Parts(upper.flatten(-2), lower.flatten(-2), whole, tail)
    start, count = _meeting(tail.shape[-1], layer)
    ends = tail[..., half:].flip(-1) if layer.turn else tail[..., half:]
    return _Parts(
        torch.cat([upper.flatten(-2), tail[..., start : start + count]], -1), torch.cat([lower.flatten(-2), ends], -1), whole, tail
    )


def _meeting(tail: int, layer: _Layer) -> tuple[int, int]:
    """Where in the first half of a short last block the wires with a partner begin, and how many there are."""
    count = tail - layer.block // 2
    return (layer.block - tail if layer.turn else 0), count


def _join(upper: Tensor, lower: Tensor, values: Tensor, parts: _Parts, layer: _Layer) -> Tensor:
    """The wires in their order, with what has become of the pairs."""
    half, whole, tail = max(layer.block // 2, 1), parts.whole, parts.tail
    heads = [side[..., : whole * half].unflatten(-1, (whole, half)) for side in (upper, lower)]
    mirrored = bool(layer.block and layer.turn)
    blocks = torch.cat([heads[0], heads[1].flip(-1) if mirrored else heads[1]], -1).flatten(-2)
    if not layer.block:
        return torch.cat([values[..., : layer.turn], blocks, tail], -1)
    if tail.shape[-1] <= half:
        return torch.cat([blocks, tail], -1) if tail.shape[-1] else blocks
    start, count = _meeting(tail.shape[-1], layer)
    ends = lower[..., whole * half :]
    after = [upper[..., whole * half :], tail[..., start + count : half], ends.flip(-1) if mirrored else ends]
    return torch.cat([blocks, tail[..., :start], *after], -1)


def _mix(values: Tensor, stay: Tensor, layer: _Layer) -> Tensor:
    """Pass vectors ``(..., rows, wires)`` through a layer that leaves a pair in place with weight ``stay`` and swaps it otherwise."""
    parts = _split(values, layer)
    moved = (parts.upper - parts.lower) * (1 - stay.unsqueeze(-2))
    return _join(parts.upper - moved, parts.lower + moved, values, parts, layer)


def _compare(values: Tensor, tau: Number, swap: str, layer: _Layer) -> tuple[Tensor, Tensor]:
    """What the comparators decide, and the values after them."""
    parts = _split(values, layer)
    gap = parts.upper - parts.lower
    stay = SWAPS[swap](over(gap, tau))
    moved = gap * (1 - stay)
    return stay, _join(parts.upper - moved, parts.lower + moved, values, parts, layer)


def _compare_some(values: Tensor, there: Tensor, tau: Number, swap: str, layer: _Layer) -> tuple[Tensor, Tensor, Tensor]:
    """The same where wires may be empty: an item wins against nothing, and two of nothing stay."""
    parts, seats = _split(values, layer), _split(there, layer)
    both, alone = seats.upper & seats.lower, seats.lower & ~seats.upper
    gap = torch.where(both, parts.upper - parts.lower, 0.0)
    stay = torch.where(both, SWAPS[swap](over(gap, tau)), (~alone).to(gap.dtype))
    moved = gap * (1 - stay)
    high = torch.where(alone, parts.lower, parts.upper - moved)
    low = torch.where(alone, parts.upper, parts.lower + moved)
    there = _join(seats.upper | seats.lower, both, there, seats, layer)
    return stay, _join(high, low, values, parts, layer), there


class _Run(NamedTuple):
    """A network that has sorted a row."""

    layers: list[_Layer]
    stays: list[Tensor]
    order: Tensor  # which item entered on each wire


def _run(scores: Tensor, tau: Number, network: str, swap: str, presort: bool, among: Among | None) -> _Run:
    _check(network, swap)
    n = scores.shape[-1]
    if isinstance(n, torch.SymInt) and is_exporting():
        raise RuntimeError("network does not export with a dynamic length: its layers depend on n; export with a fixed length")
    # The layers depend on n: a range makes a compiler take its length as a constant, and a model is compiled again for another n.
    layers, stays = _layers(network, len(range(n))), []
    check_size("network", *scores.shape[:-1], len(layers), n, what="record of layers")
    ranked = scores if among is None else among.hide(scores)
    order = descending_order(ranked) if presort else torch.arange(n, dtype=torch.long, device=scores.device).expand(scores.shape)
    values, there = scores.gather(-1, order), None if among is None else among.items.gather(-1, order)
    for layer in layers:
        if there is None:
            stay, values = _compare(values, column(tau, scores), swap, layer)
        else:
            stay, values, there = _compare_some(values, there, column(tau, scores), swap, layer)
        stays.append(stay)
    return _Run(layers, stays, order)


def _check(network: str, swap: str) -> None:
    if network not in NETWORKS:
        raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got {network!r}")
    if swap not in SWAPS:
        raise ValueError(f"swap must be one of {', '.join(SWAPS)}, got {swap!r}")


def _back(rows: Tensor, run: _Run) -> Tensor:
    """Trace weights ``(..., rows, n)`` on the outputs back to the items."""
    for layer, stay in zip(reversed(run.layers), reversed(run.stays), strict=True):
        rows = _mix(rows, stay, layer)
    return torch.zeros_like(rows).scatter(-1, run.order.unsqueeze(-2).expand(rows.shape), rows)


def _mask(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    network: str = "bitonic",
    swap: str = "logistic",
    presort: bool = True,
    among: Among | None = None,
) -> Tensor:
    run = _run(scores, tau, network, swap, presort, among)
    count = k if among is None else among.k
    top = (torch.arange(scores.shape[-1], dtype=torch.long, device=scores.device) < count).to(scores.dtype).expand(scores.shape)
    mask = _back(top.unsqueeze(-2), run).squeeze(-2).clamp(0, 1)
    # The sum is kept by every comparator, but for rounding.
    return mask * (count / mask.detach().sum(-1, keepdim=True).clamp(min=1e-9))


def _select(
    x: Tensor,
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    network: str = "bitonic",
    swap: str = "logistic",
    presort: bool = True,
    among: Among | None = None,
) -> Tensor:
    run = _run(scores, tau, network, swap, presort, among)
    columns = x.gather(-2, run.order.unsqueeze(-1).expand(x.shape)).mT
    for layer, stay in zip(run.layers, run.stays, strict=True):
        columns = _mix(columns, stay, layer)
    return columns[..., :k].mT


def _matrix(
    scores: Tensor,
    k: int,
    tau: Number = 1.0,
    *,
    network: str = "bitonic",
    swap: str = "logistic",
    presort: bool = True,
    among: Among | None = None,
) -> Tensor:
    n = scores.shape[-1]
    check_size("network", *scores.shape[:-1], k, n, fix="soft_topk and select_topk need no matrix")
    run = _run(scores, tau, network, swap, presort, among)
    return _back(torch.eye(k, n, dtype=scores.dtype, device=scores.device).expand(*scores.shape[:-1], k, n), run)


@relaxation(
    "network",
    kind="matrix",
    cost="O(n log^2 n); matrix O(nk log^2 n)",
    paper="Petersen, Borgelt, Kuehne, Deussen 2021, 2022",
    mask=_mask,
    select=_select,
    special=_matrix,
    smooth=False,
    monotone=False,
    flat_limit=False,
    exports=False,
    ties_equal=False,
)
def network_matrix(
    scores: Tensor, k: int, tau: Number = 1.0, *, network: str = "bitonic", swap: str = "logistic", presort: bool = True
) -> Tensor:
    r"""A sorting network whose comparators swap softly.

    .. math:: \begin{pmatrix} a' \\ b' \end{pmatrix} = \begin{pmatrix} \alpha & 1 - \alpha \\ 1 - \alpha & \alpha \end{pmatrix}
              \begin{pmatrix} a \\ b \end{pmatrix}, \quad \alpha = F((a - b) / \tau)

    The product of all comparators is doubly stochastic. Traced back from the first k outputs, the mask needs one vector and the
    matrix k of them. With L layers that is 3 n L operations for the mask and (k + 3) n L for the matrix, and as many numbers are kept
    for a gradient; no order of the work makes a matrix cheaper, as every comparator mixes two columns of it.

    Args:
        scores: ``(..., n)``.
        k: how many rows.
        tau: temperature of every comparator, a number or ``(...)``.
        network: ``"bitonic"``, in log2(n) (log2(n) + 1) / 2 layers, rounded up, or ``"odd_even"``, in n layers of neighbours; both
            for any n, without padding.
        swap: F, as in the two papers: ``"logistic"``; ``"logistic_phi"``, of ``x / |x|^(1/4)``; ``"gaussian"``; and the three for
            which every comparator keeps a positive slope at any distance, ``"cauchy"``, ``"reciprocal"`` (``1/2 + x / (1 + 2 |x|)``)
            and ``"optimal"`` (linear up to 1/4, then with tails ``1 / (16 x)``).
        presort: let the scores enter in their order, so that the result does not depend on where an item stands. The published
            networks take them as they come: smooth in the scores, but not equivariant.

    Returns:
        ``(..., k, n)``, rows that sum to 1, columns that sum to at most 1.

    Example:
        >>> network_matrix(torch.tensor([1.0, 3.0]), k=2)
        tensor([[0.1192, 0.8808],
                [0.8808, 0.1192]])
    """
    return _matrix(scores, k, tau, network=network, swap=swap, presort=presort)
