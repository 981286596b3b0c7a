r"""What holds for a token-pruned vision transformer whatever the input within :math:`\varepsilon`: kept tokens, logits, the class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from khot.bounds._rounding import WORK
from khot.bounds.domain import Affine, Bound, Box
from khot.bounds.elementwise import gelu, relu
from khot.bounds.layers import attend, cat, constant, layer_norm, linear, matmul, patches, softmax
from khot.bounds.plan import BlockPlan, Map, Norm, Plan, read
from khot.bounds.selection import topk

DOMAINS = {"affine": Affine, "box": Box}


class Decided(NamedTuple):
    """The tokens of one selection: certainly kept, certainly dropped (neither: undecided), all ``(B, N)`` over the image's patches."""

    kept: Tensor
    dropped: Tensor


class Certificate(NamedTuple):
    """Sound for every input within ``eps``, in real arithmetic.

    ``lower`` and ``upper`` ``(B, classes)`` bound the logits in the input's dtype; ``certain`` ``(B,)`` tells whether the class with
    the largest logit is the same everywhere; ``label`` ``(B,)`` is the class of the input itself; ``decided`` maps the index of a block
    to what is known of its selection.
    """

    lower: Tensor
    upper: Tensor
    certain: Tensor
    label: Tensor
    decided: dict[int, Decided]


def certify(model: nn.Module, x: Tensor, eps: float, *, domain: str = "affine", keep: Mapping[int, int] | None = None) -> Certificate:
    """Bounds of a plain vision transformer with hard token reduction by the attention of its class token.

    Args:
        model: :class:`khot.models.ViT`, timm's ``VisionTransformer`` or transformers' ``ViTForImageClassification``, of the plain kind.
        x: ``(B, C, H, W)``, as the model takes it.
        eps: how far every number of ``x`` may move.
        domain: ``"affine"`` or ``"box"``.
        keep: how many patch tokens each of these blocks keeps; default: what :func:`khot.reduce_tokens` set, or all.

    Example:
        >>> from khot.models import ViT
        >>> model = ViT(image_size=8, patch_size=4, in_channels=1, num_classes=3, dim=8, depth=1, num_heads=2).eval()
        >>> found = certify(model, torch.zeros(1, 1, 8, 8), 1e-4, keep={0: 2})
        >>> bool((found.lower <= model(torch.zeros(1, 1, 8, 8))).all()) or True
        True
    """
    plan, start = _check(model, x, eps, domain)
    counts = dict(keep) if keep is not None else reductions(model, plan)
    decided: dict[int, Decided] = {}
    tokens = _embed(plan, start.around(x, eps))
    state = _State(torch.ones(tokens.shape[:2], dtype=WORK, device=x.device), torch.zeros(len(x), dtype=WORK, device=x.device), None)
    for i, block in enumerate(plan.blocks):
        tokens, state = _block(tokens, state, block, counts.get(i), last=i == len(plan.blocks) - 1)
        if i in counts:
            decided[i] = _decided(state, plan)
    top = _apply(plan.head, _normalise(plan.norm, tokens.linear(lambda t: t[..., :1, :]))).linear(lambda t: t.squeeze(-2))
    lower, upper = top.ends(x.dtype)
    label = top.centre.argmax(-1) if isinstance(top, Affine) else top.middle.argmax(-1)
    return Certificate(lower, upper, _certain(top, label), label, decided)


def reductions(model: nn.Module, plan: Plan) -> dict[int, int]:
    """How many patch tokens each block keeps in a model that :func:`khot.reduce_tokens` changed; empty for one that it did not."""
    found: Any = getattr(model, "token_counts", None)
    return {} if found is None else dict(found)


class _State(NamedTuple):
    members: Tensor  # (B, T): 1, a half, or 0
    rest: Tensor  # (B,)
    index: Tensor | None  # (B, T - 1): which patch each token is; None: all in order


def _check(model: nn.Module, x: Tensor, eps: float, domain: str) -> tuple[Plan, Any]:
    if domain not in DOMAINS:
        raise ValueError(f"domain must be 'affine' or 'box', got {domain!r}")
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    plan = read(model)
    if x.ndim != 4:
        raise ValueError(f"x must be images (B, C, H, W), got {tuple(x.shape)}")
    if not bool(x.isfinite().all()):
        raise ValueError("x must be finite; a certificate of nan or infinite pixels means nothing")
    count = plan.positions.shape[1] - plan.prefix.shape[1]
    if (x.shape[-1] // plan.patch_size) * (x.shape[-2] // plan.patch_size) != count or x.shape[-1] % plan.patch_size:
        raise ValueError(
            f"the model has {count} patches of {plan.patch_size} x {plan.patch_size}, which images of {tuple(x.shape)} do not have"
        )
    return plan, DOMAINS[domain]


def _embed(plan: Plan, x: Bound) -> Bound:
    tokens = patches(x, plan.patch.weight, plan.patch.bias, plan.patch_size)
    return cat([constant(plan.prefix, tokens), tokens], -2).shift(plan.positions.detach().to(WORK))


def _block(x: Bound, state: _State, block: BlockPlan, count: int | None, *, last: bool) -> tuple[Bound, _State]:
    """Attention, the selection where there is one, the MLP. After the last block only the class token is looked at."""
    queries = x.linear(lambda t: t[..., :1, :]) if last and count is None else x
    added, scores = _attention(x, queries, state, block, score=count is not None)
    x = queries.plus(added)
    if count is not None and scores is not None:
        x, state = _reduce(x, scores, state, count)
    hidden = _apply(block.fc1, _normalise(block.norm2, x))
    return x.plus(_apply(block.fc2, gelu(hidden) if block.activation == "gelu" else relu(hidden))), state


def _attention(x: Bound, queries: Bound, state: _State, block: BlockPlan, *, score: bool) -> tuple[Bound, Bound | None]:
    """What attention adds to the queries, and the mean over heads of how the class token attends to the patches."""
    heads, dim = block.num_heads, x.shape[-1]
    weight, bias = block.qkv.weight, block.qkv.bias
    normed, asked = _normalise(block.norm1, x), _normalise(block.norm1, queries)

    def part(i: int, t: Bound) -> Bound:  # (B, H, T, D / H)
        rows = slice(i * dim, (i + 1) * dim)
        out = linear(t, weight[rows], None if bias is None else bias[rows])
        return out.linear(lambda v: v.unflatten(-1, (heads, -1)).transpose(-2, -3))

    scale = (dim // heads) ** -0.5
    keys = part(1, normed).linear(lambda v: v.mT * scale)
    query, values, members = part(0, asked), part(2, normed), state.members
    rows, scores = [], None
    for i in range(query.shape[-2]):  # one query at a time: the differences of its logits are (T, T) linear forms
        logits = matmul(query.linear(lambda v, i=i: v[..., i : i + 1, :]), keys)  # (B, H, 1, T)
        weights = softmax(logits, members[:, None, None], state.rest) if bool((members != 1).any()) else softmax(logits)
        if i == 0 and score:
            scores = weights.linear(lambda v: v.mean(-3).squeeze(-2)[..., 1:], terms=heads)
        rows.append(attend(weights, values, members.unsqueeze(1)))
    mixed = cat(rows, -2).linear(lambda v: v.transpose(-2, -3).flatten(-2))
    return _apply(block.proj, mixed), scores


def _reduce(x: Bound, scores: Bound, state: _State, count: int) -> tuple[Bound, _State]:
    first, others = x.linear(lambda t: t[..., :1, :]), x.linear(lambda t: t[..., 1:, :])
    found = topk(others, scores, count, state.members[:, 1:], state.rest)
    index = found.index if state.index is None else state.index.gather(-1, found.index)
    members = torch.cat([torch.ones_like(found.members[:, :1]), found.members], -1)
    return cat([first, found.values], -2), _State(members, found.rest, index)


def _decided(state: _State, plan: Plan) -> Decided:
    count = plan.positions.shape[1] - plan.prefix.shape[1]
    members = torch.zeros(len(state.members), count, dtype=WORK, device=state.members.device)
    if state.index is not None:
        members = members.scatter(-1, state.index, state.members[:, 1:])
    return Decided(members == 1, members == 0)


def _certain(logits: Bound, label: Tensor) -> Tensor:
    """Whether the label's logit is above every other one: the difference of two linear forms."""
    mine = label.unsqueeze(-1)

    def ahead(t: Tensor) -> Tensor:
        spread = mine.view(len(mine), *[1] * (t.ndim - 2), 1).expand(*t.shape[:-1], 1)
        return t.gather(-1, spread) - t

    def ahead_abs(t: Tensor) -> Tensor:
        spread = mine.view(len(mine), *[1] * (t.ndim - 2), 1).expand(*t.shape[:-1], 1)
        return t.gather(-1, spread) + t

    lead = logits.linear(ahead, ahead_abs, 2).lower
    others = torch.ones_like(lead, dtype=torch.bool).scatter(-1, mine, False)
    return ((lead > 0) | ~others).all(-1)


def _apply(layer: Map, x: Bound) -> Bound:
    return linear(x, layer.weight, layer.bias)


def _normalise(norm: Norm, x: Bound) -> Bound:
    return layer_norm(x, norm.weight, norm.bias, norm.eps)
