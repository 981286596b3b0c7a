r"""What holds for a token-pruned vision transformer whatever the input within :math:`\varepsilon`: kept tokens, logits, the class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, cast

import torch
from torch import Tensor, nn

from khot.bounds._rounding import WORK
from khot.bounds.affine import Affine
from khot.bounds.box import Box
from khot.bounds.domain import Bound, Domain
from khot.bounds.elementwise import gelu, relu
from khot.bounds.layers import attend, cat, gather, layer_norm, linear, matmul, patches, softmax
from khot.bounds.plan import BlockPlan, Map, Norm, Plan, read
from khot.bounds.selection import topk
from khot.models.reduced import ReducedModel, kept_count
from khot.nn.token_topk import TokenTopK

DOMAINS = {"affine": Affine, "box": Box}


class Decided(NamedTuple):
    """The tokens of one selection, ``(B, N)`` over the image's patches; those that an earlier selection dropped for certain are in none."""

    kept: Tensor
    dropped: Tensor
    undecided: Tensor

    @property
    def share(self) -> Tensor:
        """How many of the tokens that are there are decided, ``(B,)`` between 0 and 1."""
        decided = (self.kept | self.dropped).sum(-1)
        return decided / (decided + self.undecided.sum(-1))


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
        >>> images = torch.zeros(1, 1, 8, 8)
        >>> found = certify(khot.reduce_tokens(model, keep=0.5, at=(0,)), images, 1e-6)
        >>> bool(((found.lower <= model(images)) & (model(images) <= found.upper)).all())
        True
    """
    plan, start = _check(model, x, eps, domain)
    counts = dict(keep) if keep is not None else reductions(model, plan)
    if not all(0 <= i < len(plan.blocks) and 0 < count <= plan.num_patches for i, count in counts.items()):
        raise ValueError(f"keep must map blocks 0 to {len(plan.blocks) - 1} to 1 to {plan.num_patches} tokens, got {counts}")
    decided: dict[int, Decided] = {}
    tokens = _embed(plan, start.around(x, eps))
    state = _all_there(len(x), tokens.shape[1], x.device)
    for i, block in enumerate(plan.blocks):
        tokens, after = _block(tokens, state, block, counts.get(i), last=i == len(plan.blocks) - 1)
        if i in counts:
            decided[i] = _decided(state, after, plan)
        state = after
    top = _apply(plan.head, _normalise(plan.norm, tokens)).view(lambda t: t.squeeze(-2))
    lower, upper = top.ends(x.dtype)
    label = top.middle.argmax(-1)
    return Certificate(lower, upper, _certain(top, label), label, decided)


def reductions(model: nn.Module, plan: Plan) -> dict[int, int]:
    """How many patch tokens each block keeps in a model that :func:`khot.reduce_tokens` changed; empty for one that it did not."""
    if not isinstance(model, ReducedModel):
        return {}
    for module in cast("nn.Module", model).modules():
        if isinstance(module, TokenTopK) and (module.score != "cls" or module.fuse or module.num_prefix != plan.prefix.shape[1]):
            raise TypeError(
                "certify knows reduction by the attention of the class token that drops tokens: score='cls', fuse=False, one prefix"
                f" token; got score={module.score!r}, fuse={module.fuse}, num_prefix={module.num_prefix}"
            )
    return {block: kept_count(plan.num_patches, model.keep, stage) for block, stage in model.khot_blocks.items()}


class _State(NamedTuple):
    """Which tokens take part: as in :class:`khot.bounds.selection.Selected`, with the class token first."""

    members: Tensor  # (B, T): 1, a half, or 0
    rest: Tensor  # (B,)
    index: Tensor  # (B, T - 1): which patch each token is
    whole: bool  # nothing was selected so far


def _all_there(batch: int, tokens: int, device: torch.device) -> _State:
    members = torch.ones(batch, tokens, dtype=WORK, device=device)
    return _State(
        members, torch.zeros_like(members[:, 0]), torch.arange(tokens - 1, dtype=torch.long, device=device).expand(batch, -1), True
    )


class _Heads(NamedTuple, Generic[Bound]):
    query: Bound  # (B, H, T, D / H)
    keys: Bound  # (B, H, D / H, T), scaled
    values: Bound


def _check(model: nn.Module, x: Tensor, eps: float, domain: str) -> tuple[Plan, Any]:
    if domain not in DOMAINS:
        raise ValueError(f"domain must be 'affine' or 'box', got {domain!r}")
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    plan = read(model)
    if model.training:
        raise ValueError("model must be in eval mode, where it has no dropout; call model.eval() first")
    if x.ndim != 4:
        raise ValueError(f"x must be images (B, C, H, W), got {tuple(x.shape)}")
    if not bool(x.isfinite().all()):
        raise ValueError("x must be finite; a certificate of nan or infinite pixels means nothing")
    count, size = plan.num_patches, plan.patch_size
    if (x.shape[-1] // size) * (x.shape[-2] // size) != count or x.shape[-1] % size or x.shape[-2] % size:
        raise ValueError(f"the model has {count} patches of {size} x {size}, which images of {tuple(x.shape)} do not have")
    return plan, DOMAINS[domain]


def _embed(plan: Plan, x: Bound) -> Bound:
    tokens = patches(x, plan.patch.weight, plan.patch.bias, plan.patch_size)
    return cat([tokens.constant(plan.prefix), tokens], -2).shift(plan.positions.detach().to(WORK))


def _block(x: Bound, state: _State, block: BlockPlan, count: int | None, *, last: bool) -> tuple[Bound, _State]:
    """Attention, the selection where there is one, the MLP; attention is worked out for those tokens only that go on."""
    heads, after = _project(block, _normalise(block.norm1, x)), state
    first = torch.zeros_like(state.members[:, :1], dtype=torch.long)
    going = None
    if count is not None:
        after, chosen = _select(x, heads, state, count)
        going = torch.cat([first, chosen + 1], -1)
    if last:  # after it only the class token is looked at
        going = first
    query = heads.query
    if going is not None:
        x, query = gather(x, going), gather(query, going)
    x = x.plus(_apply(block.proj, _attention(query, heads, state))).name_slack()
    hidden = _apply(block.fc1, _normalise(block.norm2, x))
    out = x.plus(_apply(block.fc2, gelu(hidden) if block.activation == "gelu" else relu(hidden)))
    return out.name_slack(), after


def _project(block: BlockPlan, x: Bound) -> _Heads[Bound]:
    heads, dim = block.num_heads, x.shape[-1]
    weight, bias = block.qkv.weight, block.qkv.bias

    def part(i: int) -> Bound:
        rows = slice(i * dim, (i + 1) * dim)
        out = linear(x, weight[rows], None if bias is None else bias[rows])
        return out.view(lambda v: v.unflatten(-1, (heads, -1)).transpose(-2, -3))

    scale = (dim // heads) ** -0.5
    return _Heads(part(0), part(1).linear(lambda v: v.mT * scale), part(2))


def _weights(query: Bound, heads: _Heads[Bound], state: _State) -> Bound:
    """How one query ``(B, H, 1, D / H)`` attends, ``(B, H, 1, T)``."""
    logits, members = matmul(query, heads.keys), state.members
    return softmax(logits, members[:, None, None], state.rest) if bool((members != 1).any()) else softmax(logits)


def _attention(query: Bound, heads: _Heads[Bound], state: _State) -> Bound:
    """Weighted values ``(B, Q, D)``, one query at a time: the differences of its logits are T x T linear forms."""
    rows = [_weights(query.view(lambda v, i=i: v[..., i : i + 1, :]), heads, state) for i in range(query.shape[-2])]
    mixed = cat([attend(row, heads.values, state.members.unsqueeze(1)) for row in rows], -2)
    return mixed.view(lambda v: v.transpose(-2, -3).flatten(-2))


def _select(x: Bound, heads: _Heads[Bound], state: _State, count: int) -> tuple[_State, Tensor]:
    """The selection by the class token's attention, mean over heads, and which patches of ``x`` may be in it, ``(B, M)``."""
    row = _weights(heads.query.view(lambda v: v[..., :1, :]), heads, state)
    scores = row.linear(lambda v: v.mean(-3).squeeze(-2)[..., 1:], terms=row.shape[1])
    earlier = None if state.whole else state.members[:, 1:]
    found = topk(x.view(lambda t: t[..., 1:, :]), scores, count, earlier, state.rest)
    members = torch.cat([torch.ones_like(found.members[:, :1]), found.members], -1)
    return _State(members, found.rest, state.index.gather(-1, found.index), False), found.index


def _decided(before: _State, after: _State, plan: Plan) -> Decided:
    def over_patches(state: _State) -> Tensor:
        empty = torch.zeros(len(state.members), plan.num_patches, dtype=WORK, device=state.members.device)
        return empty.scatter(-1, state.index, state.members[:, 1:])

    there, members = over_patches(before) > 0, over_patches(after)
    return Decided(members == 1, there & (members == 0), members == 0.5)


def _certain(logits: Domain, label: Tensor) -> Tensor:
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
