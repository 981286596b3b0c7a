"""One block of a transformer on bounds, and the selection of tokens inside it."""

from __future__ import annotations

from typing import Generic, NamedTuple

import torch
from torch import Tensor

from khot.bounds._rounding import WORK
from khot.bounds.domain import Bound
from khot.bounds.elementwise import gelu, relu
from khot.bounds.layers import attend, cat, gather, layer_norm, linear, matmul, softmax
from khot.bounds.plan import BlockPlan, Map, Norm
from khot.bounds.selection import topk

MOST_CASES = 6  # of the undecided tokens that are gone through one by one


class State(NamedTuple):
    """Which tokens take part: as in :class:`khot.bounds.selection.Selected`, with the class token first."""

    members: Tensor  # (B, T): 1, a half, or 0
    rest: Tensor  # (B,)
    index: Tensor  # (B, T - 1): which patch each token is
    whole: bool  # nothing was selected so far


def all_there(batch: int, tokens: int, device: torch.device) -> State:
    members = torch.ones(batch, tokens, dtype=WORK, device=device)
    return State(
        members, torch.zeros_like(members[:, 0]), torch.arange(tokens - 1, dtype=torch.long, device=device).expand(batch, -1), True
    )


class _Heads(NamedTuple, Generic[Bound]):
    query: Bound  # (B, H, T, D / H)
    keys: Bound  # (B, H, D / H, T), scaled
    values: Bound


def run_block(x: Bound, state: State, block: BlockPlan, count: int | None, case: Tensor | None, *, last: bool) -> tuple[list[Bound], State]:
    """Attention, the selection where there is one, the MLP; attention is worked out for those tokens only that go on.

    What comes out is one of the bounds in the list, one for each choice of the undecided tokens that attention may have seen.
    """
    heads, after = _project(block, normalise(block.norm1, x)), state
    first = torch.zeros_like(state.members[:, :1], dtype=torch.long)
    going = None
    if count is not None:
        after, chosen = _select(x, heads, state, count) if case is None else _given(state, case)
        going = torch.cat([first, chosen + 1], -1)
    if last:  # after it only the class token is looked at
        going = first
    query = heads.query
    if going is not None:
        x, query = gather(x, going), gather(query, going)
    return [_residual(x, _attention(query, heads, one), block) for one in _cases(state)], after


def _residual(x: Bound, mixed: Bound, block: BlockPlan) -> Bound:
    x = x.plus(apply(block.proj, mixed)).name_slack()
    hidden = apply(block.fc1, normalise(block.norm2, x))
    return x.plus(apply(block.fc2, gelu(hidden) if block.activation == "gelu" else relu(hidden)))


def merge(parts: list[Bound]) -> Bound:
    """One of the parts. Each has named slack of its own: the unknowns are from here on those of the part that holds."""
    return parts[0].or_else(parts[1:]) if len(parts) > 1 else parts[0]


def _project(block: BlockPlan, x: Bound) -> _Heads[Bound]:
    heads, dim = block.num_heads, x.shape[-1]
    weight, bias = block.qkv.weight, block.qkv.bias

    def part(i: int) -> Bound:
        rows = slice(i * dim, (i + 1) * dim)
        out = linear(x, weight[rows], None if bias is None else bias[rows])
        return out.view(lambda v: v.unflatten(-1, (heads, -1)).transpose(-2, -3))

    scale = (dim // heads) ** -0.5
    return _Heads(part(0), part(1).linear(lambda v: v.mT * scale), part(2))


def _weights(query: Bound, heads: _Heads[Bound], state: State) -> Bound:
    """How one query ``(B, H, 1, D / H)`` attends, ``(B, H, 1, T)``."""
    logits, members = matmul(query, heads.keys), state.members
    return softmax(logits, members[:, None, None], state.rest) if bool((members != 1).any()) else softmax(logits)


def _cases(state: State) -> list[State]:
    """The choices of the undecided tokens where one of them is in, or one is out: as many as there are of these, not more.

    An image with another number of choices stays as it is, in each of them.
    """
    maybe = state.members == 0.5
    count, rest = maybe.sum(-1), state.rest.long()
    simple = (count <= MOST_CASES) & (count > 1) & ((rest == 1) | (rest == count - 1))
    if not bool(simple.any()):
        return [state]
    order = maybe.to(WORK).sort(dim=-1, descending=True, stable=True).indices  # the undecided ones first
    left = torch.where(simple, 0, state.rest)
    others = (rest != 1).to(WORK).unsqueeze(-1)  # what the tokens are that are not the one
    out = []
    for i in range(int(count[simple].max())):
        one = order.gather(-1, torch.minimum(torch.full_like(count, i), (count - 1).clamp(min=0)).unsqueeze(-1))
        chosen = torch.where(maybe, others, state.members).scatter(-1, one, 1 - others)
        out.append(state._replace(members=torch.where(simple.unsqueeze(-1), chosen, state.members), rest=left))
    return out


def _attention(query: Bound, heads: _Heads[Bound], state: State) -> Bound:
    """Weighted values ``(B, Q, D)``, one query at a time: the differences of its logits are T x T linear forms."""
    rows = [_weights(query.view(lambda v, i=i: v[..., i : i + 1, :]), heads, state) for i in range(query.shape[-2])]
    mixed = cat([attend(row, heads.values, state.members.unsqueeze(1)) for row in rows], -2)
    return mixed.view(lambda v: v.transpose(-2, -3).flatten(-2))


def _select(x: Bound, heads: _Heads[Bound], state: State, count: int) -> tuple[State, Tensor]:
    """The selection by the class token's attention, mean over heads, and which patches of ``x`` may be in it, ``(B, M)``."""
    row = _weights(heads.query.view(lambda v: v[..., :1, :]), heads, state)
    scores = row.linear(lambda v: v.mean(-3).squeeze(-2)[..., 1:], terms=row.shape[1])
    earlier = None if state.whole else state.members[:, 1:]
    found = topk(x.view(lambda t: t[..., 1:, :]), scores, count, earlier, state.rest)
    members = torch.cat([torch.ones_like(found.members[:, :1]), found.members], -1)
    return State(members, found.rest, state.index.gather(-1, found.index), False), found.index


def _given(state: State, case: Tensor) -> tuple[State, Tensor]:
    members = torch.ones(len(case), case.shape[1] + 1, dtype=WORK, device=case.device)
    return State(members, torch.zeros_like(members[:, 0]), state.index.gather(-1, case), False), case


def apply(layer: Map, x: Bound) -> Bound:
    return linear(x, layer.weight, layer.bias)


def normalise(norm: Norm, x: Bound) -> Bound:
    return layer_norm(x, norm.weight, norm.bias, norm.eps)
