"""Token reduction of an existing encoder, in place, and its undoing."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from khot.models.encoders import Kind, count_prefix, find_blocks, has_norms, head_weights, projections
from khot.models.reduced import Capture, Plan, ReducedBlock, ReducedModel, Stage, check_keep, original, patched
from khot.nn.token_topk import Gradient, Score, TokenTopK

Model = TypeVar("Model", bound=nn.Module)


def reduce_tokens(
    model: Model,
    keep: float = 0.7,
    at: Sequence[int] = (3, 6, 9),
    *,
    score: Score | None = None,
    fuse: bool = False,
    gradient: Gradient = "straight",
    tau: float = 1.0,
    num_prefix: int | None = None,
) -> Model:
    r"""Make an encoder drop tokens: in the blocks ``at``, between attention and MLP, only the best tokens go on.

    After the s-th of these blocks :math:`\lfloor N r^s \rfloor` of the N patches (or words) are left, with r the keep rate; the class
    token and other prefix tokens always stay. The model is changed in place: its parameters and the names in its state dict are the
    same, attention runs on whatever fused kernel it had, and the score is one row of attention, O(N).

    ``model.keep`` may be set later, ``model.kept_tokens`` tells what was kept, :func:`restore_tokens` undoes everything.
    ``keep=1`` computes exactly what the model did before.

    Args:
        model: a ViT of :mod:`khot.models`, of timm 1.0 or of transformers 5; or BERT.
        keep: share of the tokens that each of the blocks keeps, in (0, 1].
        at: which blocks, counted from 0.
        score: ``"cls"`` (attention of the class token, mean over heads), ``"received"`` (attention of the mean query, for models without
            a class token), ``"learned"``, ``"random"`` or a callable ``(tokens) -> (B, N)``. By default ``"cls"``, and ``"received"``
            for a model without prefix tokens.
        fuse: one more token, the sum of the dropped ones weighted by their scores.
        gradient, tau: how a learned score is trained, see :class:`khot.nn.TokenTopK`.
        num_prefix: how many tokens come before the patches; found out by itself for the models above.

    Returns:
        The model.

    Example:
        >>> model = khot.models.create_model("vit", preset="tiny").eval()
        >>> images = torch.randn(2, 1, 28, 28)
        >>> khot.reduce_tokens(model, keep=0.5, at=(1, 3, 4))(images).shape
        torch.Size([2, 10])
        >>> {block: tuple(kept.shape) for block, kept in model.kept_tokens.items()}
        {1: (2, 24), 3: (2, 12), 4: (2, 6)}
        >>> type(khot.restore_tokens(model)).__name__
        'ViT'

    Papers: Haurum et al. 2023, "Which Tokens to Use?"; Liang et al. 2022 (EViT); Rao et al. 2021 (DynamicViT).
    """
    check_keep(keep)
    if num_prefix is not None and num_prefix < 0:
        raise ValueError(f"num_prefix must not be negative, got {num_prefix}")
    blocks, kind = find_blocks(model)
    stages = _check_blocks(at, len(blocks))
    plan = Plan(float(keep), count_prefix(model) if num_prefix is None else num_prefix)
    score = score or ("cls" if plan.num_prefix else "received")
    if score == "cls" and not plan.num_prefix:
        raise ValueError(f"{type(model).__name__} has no class token; use score='received'")
    make = functools.partial(
        TokenTopK, dim=_width(blocks[0], kind), score=score, num_prefix=plan.num_prefix, fuse=fuse, gradient=gradient, tau=tau
    )
    make()  # refuse bad arguments before anything is changed
    restore_tokens(model)
    for i in range(stages[0], len(blocks)):
        before = sum(stage < i for stage in stages)
        _patch_block(blocks[i], Stage(plan, kind, i, before + 1 if i in stages else 0, before), make)
    changed: Any = model
    changed.__class__ = patched(type(model), ReducedModel)
    changed.khot_plan, changed.khot_blocks = plan, {block: i for i, block in enumerate(stages, 1)}
    return model


def restore_tokens(model: Model) -> Model:
    """Undo :func:`reduce_tokens`; a model that was not changed stays as it is.

    Args:
        model: what :func:`reduce_tokens` was given.

    Returns:
        The same model, changed in place.

    Example:
        >>> model = khot.models.create_model("vit", preset="tiny")
        >>> khot.restore_tokens(khot.reduce_tokens(model, at=(1, 3))) is model
        True
    """
    for module in list(model.modules()):
        if isinstance(module, ReducedBlock):
            for handle in module.khot_stage.handles:
                handle.remove()
            _unpatch(module, "khot_stage", "token_topk")
    if isinstance(model, ReducedModel):
        _unpatch(model, "khot_plan", "khot_blocks")
    return model


def _check_blocks(at: Sequence[int], depth: int) -> list[int]:
    blocks = list(at) if isinstance(at, Iterable) else []
    if not blocks or len(set(blocks)) != len(blocks) or not all(isinstance(i, int) and 0 <= i < depth for i in blocks):
        raise ValueError(f"at must name different blocks from 0 to {depth - 1}, got {at!r}")
    return sorted(blocks)


def _patch_block(block: Any, stage: Stage, make: Any) -> None:
    if stage.stage:
        like = next(block.parameters())
        block.token_topk = make().to(device=like.device, dtype=like.dtype).train(block.training)
        if block.token_topk.needs_attention:
            attention = getattr(block, stage.kind.attention)
            block.token_topk.register_buffer("heads", head_weights(attention), persistent=False)
            stage.normed = has_norms(attention)
            sources = dict.fromkeys(projections(attention))  # once each, in order
            stage.captures = [Capture(stage.plan) for _ in sources]
            stage.handles = [each.register_forward_hook(hook) for each, hook in zip(sources, stage.captures, strict=True)]
    block.khot_stage = stage
    block.__class__ = patched(type(block), ReducedBlock)


def _width(block: Any, kind: Kind) -> int:
    """The size of a token: queries are made of it."""
    return cast(nn.Linear, projections(getattr(block, kind.attention))[0]).in_features


def _unpatch(module: Any, *names: str) -> None:
    module.__class__ = original(type(module))
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
