r"""What holds for a token-pruned vision transformer whatever the input within :math:`\varepsilon`: kept tokens, logits, the class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from khot.bounds._rounding import WORK
from khot.bounds.affine import Affine
from khot.bounds.blocks import State, all_there, apply, merge, normalise, run_block
from khot.bounds.box import Box
from khot.bounds.domain import Bound, Domain
from khot.bounds.layers import cat, patches
from khot.bounds.plan import Plan, read
from khot.bounds.selection import combinations_of
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
    the largest logit is the same everywhere; ``label`` ``(B,)`` is that class, or, where it is not certain, the one whose bounds have the
    largest middle; ``decided`` maps the index of a block to what is known of its selection.
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
    return _pass(plan, start, x, eps, _counts(model, plan, keep), {})


def certify_cases(
    model: nn.Module, x: Tensor, eps: float, *, domain: str = "affine", keep: Mapping[int, int] | None = None
) -> Iterator[Certificate]:
    """One certificate for each selection that is possible in the first reduced block: the slow way, for one image.

    :func:`certify` covers all of them in one pass. This one shows what that pass costs in width. The arguments are the same; selections
    in later blocks are not enumerated.

    Example:
        >>> from khot.models import ViT
        >>> model = ViT(image_size=8, patch_size=4, in_channels=1, num_classes=3, dim=8, depth=1, num_heads=2).eval()
        >>> len(list(certify_cases(model, torch.zeros(1, 1, 8, 8), 0.0, keep={0: 4})))
        1
    """
    if len(x) != 1:
        raise ValueError(f"cases are enumerated for one image at a time, got a batch of {len(x)}")
    plan, start = _check(model, x, eps, domain)
    counts = _counts(model, plan, keep)
    found = _pass(plan, start, x, eps, counts, {})
    if not counts:
        return iter([found])
    first = min(counts)
    decided = found.decided[first]
    sure, maybe = decided.kept[0].nonzero().flatten(), decided.undecided[0].nonzero().flatten()
    cases = combinations_of(sure, maybe, counts[first] - len(sure))
    return (_pass(plan, start, x, eps, counts, {first: case}) for case in cases)


def _pass(plan: Plan, start: Any, x: Tensor, eps: float, counts: Mapping[int, int], cases: Mapping[int, Tensor]) -> Certificate:
    """``cases`` maps a block to the patches ``(1, k)`` that it is taken to select; elsewhere the bounds of the scores decide."""
    decided: dict[int, Decided] = {}
    tokens = _embed(plan, start.around(x, eps))
    state = all_there(len(x), tokens.shape[1], x.device)
    parts = [tokens]
    for i, block in enumerate(plan.blocks):
        tokens = merge(parts).name_slack() if i else tokens
        parts, after = run_block(tokens, state, block, counts.get(i), cases.get(i), last=i == len(plan.blocks) - 1)
        if i in counts:
            decided[i] = _decided(state, after, plan)
        state = after
    top = merge([apply(plan.head, normalise(plan.norm, part)) for part in parts]).view(lambda t: t.squeeze(-2))
    lower, upper = top.ends(x.dtype)
    label = top.middle.argmax(-1)
    return Certificate(lower, upper, _certain(top, label), label, decided)


def _counts(model: nn.Module, plan: Plan, keep: Mapping[int, int] | None) -> dict[int, int]:
    counts = dict(keep) if keep is not None else reductions(model, plan)
    if not all(0 <= i < len(plan.blocks) and 0 < count <= plan.num_patches for i, count in counts.items()):
        raise ValueError(f"keep must map blocks 0 to {len(plan.blocks) - 1} to 1 to {plan.num_patches} tokens, got {counts}")
    return counts


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


def _check(model: nn.Module, x: Tensor, eps: float, domain: str) -> tuple[Plan, Any]:
    if domain not in DOMAINS:
        raise ValueError(f"domain must be 'affine' or 'box', got {domain!r}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and at least 0, got {eps}")
    plan = read(model)
    if model.training:
        raise ValueError("model must be in eval mode, where it has no dropout; call model.eval() first")
    if x.ndim != 4:
        raise ValueError(f"x must be images (B, C, H, W), got {tuple(x.shape)}")
    if not len(x):
        raise ValueError("x must hold at least one image, got a batch of 0")
    if not bool(x.isfinite().all()):
        raise ValueError("x must be finite; a certificate of nan or infinite pixels means nothing")
    count, size = plan.num_patches, plan.patch_size
    if (x.shape[-1] // size) * (x.shape[-2] // size) != count or x.shape[-1] % size or x.shape[-2] % size:
        raise ValueError(f"the model has {count} patches of {size} x {size}, which images of {tuple(x.shape)} do not have")
    return plan, DOMAINS[domain]


def _embed(plan: Plan, x: Bound) -> Bound:
    tokens = patches(x, plan.patch.weight, plan.patch.bias, plan.patch_size)
    return cat([tokens.constant(plan.prefix), tokens], -2).shift(plan.positions.detach().to(WORK))


def _decided(before: State, after: State, plan: Plan) -> Decided:
    def over_patches(state: State) -> Tensor:
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
