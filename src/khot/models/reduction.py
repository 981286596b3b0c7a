"""Token reduction of an existing encoder, in place, and its undoing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from khot.models.encoders import Kind, attention_row, count_prefix, find_blocks, padding, projections, take_mask
from khot.nn.token_topk import Gradient, Score, TokenTopK

Model = TypeVar("Model", bound=nn.Module)


def kept_count(num_tokens: int, keep: float, stage: int) -> int:
    """floor(N r^s), at least 1; the small number keeps 0.29 * 100 at 29."""
    return max(1, math.floor(num_tokens * keep**stage + 1e-9))


class Plan:
    """What the stages of one model share. Every stage writes its own entry only, so that a block can be computed again in backward."""

    def __init__(self, keep: float, num_prefix: int) -> None:
        self.keep, self.num_prefix = keep, num_prefix
        self.num_tokens = 0  # N of the input at hand, set by the first stage
        # What each stage chose among the tokens it saw and whether it appended a fused one; None where it dropped nothing.
        self.chosen: dict[int, tuple[Tensor, bool] | None] = {}

    def count(self, stage: int) -> int:
        return kept_count(self.num_tokens, self.keep, stage)

    def kept(self, stage: int) -> Tensor | None:
        """The places in the input, ``(B, P + k)``, of the tokens after a stage, -1 for a fused one; None while nothing was dropped."""
        places: Tensor | None = None
        for each in range(1, stage + 1):
            chosen = self.chosen.get(each)
            if chosen is not None:
                places = self._places(places, *chosen)
        return places

    def _places(self, before: Tensor | None, indices: Tensor, fused: bool) -> Tensor:
        prefix = torch.arange(self.num_prefix, device=indices.device).expand(indices.shape[0], -1)
        indices = indices + self.num_prefix if before is None else before[:, self.num_prefix :].gather(1, indices)
        parts = [prefix, indices, torch.full_like(indices[:, :1], -1)] if fused else [prefix, indices]
        return torch.cat(parts, 1)


class Capture:
    """Forward hook that keeps the output of a projection until it is asked for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.output: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.plan.keep < 1:
            self.output = output

    def take(self) -> Tensor:
        output, self.output = self.output, None
        assert output is not None
        return output


class Stage:
    """What a patched block has of its own."""

    def __init__(self, plan: Plan, kind: Kind, block: int, stage: int, after: int) -> None:
        self.plan, self.kind, self.block, self.stage = plan, kind, block, stage  # stage 0: no reduction here
        self.after = after  # how many stages come before this block
        self.captures: list[Capture] | None = None  # one for a fused projection, two for queries and keys
        self.handles: list[Any] = []


class ReducedBlock:
    """Mixin of a patched block: attention, reduction, MLP on what was kept."""

    khot_stage: Stage
    token_topk: TokenTopK

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        stage = self.khot_stage
        if stage.stage == 1:
            stage.plan.num_tokens = x.shape[1] - stage.plan.num_prefix
        if stage.plan.keep == 1:
            return super().forward(x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        args, kwargs, mask = _reduced_mask(stage, args, kwargs)
        if not stage.stage:
            return super().forward(x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return _forward(self, stage, x, mask, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (_original(type(self)), ReducedBlock), self.__dict__


class ReducedModel:
    """Mixin of a patched model."""

    khot_plan: Plan
    khot_blocks: dict[int, int]  # block -> stage

    @property
    def keep(self) -> float:
        """The keep rate; it may be set at any time."""
        return self.khot_plan.keep

    @keep.setter
    def keep(self, rate: float) -> None:
        self.khot_plan.keep = check_keep(rate)

    @property
    def kept_tokens(self) -> dict[int, Tensor]:
        """Of the last batch, by block: which of the N patches or words went on, ``(B, k)``, best first; -1 is a fused token."""
        plan, out = self.khot_plan, {}
        for block, stage in self.khot_blocks.items():
            kept = plan.kept(stage) if plan.keep < 1 else None
            if kept is not None:
                patches = kept[:, plan.num_prefix :]
                out[block] = torch.where(patches < 0, -1, patches - plan.num_prefix)
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (_original(type(self)), ReducedModel), self.__dict__


def _forward(block: Any, stage: Stage, x: Tensor, mask: Tensor | None, args: Any, kwargs: Any) -> Tensor:
    kind, attention = stage.kind, getattr(block, stage.kind.attention)
    out = attention(x if kind.bert else getattr(block, kind.norm1)(x), *args, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    y = out if kind.bert else x + _through(block, kind.after_attention, out)
    y = _reduce(block, stage, y, mask)
    if kind.bert:
        return block.output(block.intermediate(y), y)
    return y + _through(block, kind.after_mlp, block.mlp(getattr(block, kind.norm2)(y)))


def _reduce(block: Any, stage: Stage, y: Tensor, mask: Tensor | None) -> Tensor:
    plan, chooser = stage.plan, block.token_topk
    candidates = y.shape[1] - plan.num_prefix
    row = None
    if stage.captures is not None:
        outputs = [capture.take() for capture in stage.captures]
        row = attention_row(getattr(block, stage.kind.attention), outputs[0], outputs[-1], chooser.score, mask)[:, plan.num_prefix :]
    count = plan.count(stage.stage)
    if count >= candidates:
        plan.chosen[stage.stage] = None
        return y
    reduced = chooser(y, count, row, padding(mask, plan.num_prefix))
    dropped = reduced.tokens.shape[1] < y.shape[1]  # the soft mask of training drops nothing
    plan.chosen[stage.stage] = (reduced.indices, chooser.fuse) if dropped else None
    return reduced.tokens


def _through(block: Any, names: Sequence[str], x: Tensor) -> Tensor:
    for name in names:
        x = getattr(block, name)(x)
    return x


def _reduced_mask(stage: Stage, args: Any, kwargs: Any) -> tuple[Any, Any, Tensor | None]:
    """The arguments with the attention mask of the tokens at hand, and that mask."""
    mask = kwargs.get("attention_mask", kwargs.get("attn_mask", args[0] if args else None))
    kept = None if mask is None else stage.plan.kept(stage.after)
    if mask is None or kept is None:
        return args, kwargs, mask
    mask = take_mask(mask, kept.clamp(min=0))
    named = next((name for name in ("attention_mask", "attn_mask") if name in kwargs), None)
    return (args, kwargs | {named: mask}, mask) if named else ((mask, *args[1:]), kwargs, mask)


@functools.cache
def _patched(kind: type, mixin: type) -> type:
    """``kind`` with the mixin before it; made once, so that two patched blocks are of one class."""
    return type(kind.__name__, (mixin, kind), {"khot_original": kind, "__module__": kind.__module__})


def _original(kind: type) -> type:
    return kind.khot_original  # pyright: ignore[reportAttributeAccessIssue]


def _rebuild(kind: type, mixin: type) -> Any:
    """For pickle and deepcopy: an empty object of the patched class."""
    return object.__new__(_patched(kind, mixin))


def check_keep(rate: float) -> float:
    if not 0 < rate <= 1:
        raise ValueError(f"keep must lie in (0, 1], got {rate}")
    return float(rate)


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
    restore_tokens(model)
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
    for i in range(stages[0], len(blocks)):
        before = sum(stage < i for stage in stages)
        _patch_block(blocks[i], Stage(plan, kind, i, before + 1 if i in stages else 0, before), make)
    patched: Any = model
    patched.__class__ = _patched(type(model), ReducedModel)
    patched.khot_plan, patched.khot_blocks = plan, {block: i for i, block in enumerate(stages, 1)}
    return model


def restore_tokens(model: Model) -> Model:
    """Undo :func:`reduce_tokens`; a model that was not changed stays as it is.

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
    stages = sorted(set(at))
    if not stages or len(stages) != len(at) or not all(isinstance(i, int) and 0 <= i < depth for i in stages):
        raise ValueError(f"at must name different blocks from 0 to {depth - 1}, got {tuple(at)}")
    return stages


def _patch_block(block: Any, stage: Stage, make: Any) -> None:
    if stage.stage:
        like = next(block.parameters())
        block.token_topk = make().to(device=like.device, dtype=like.dtype).train(block.training)
        if block.token_topk.needs_attention:
            sources = dict.fromkeys(projections(getattr(block, stage.kind.attention)))  # once each, in order
            stage.captures = [Capture(stage.plan) for _ in sources]
            stage.handles = [each.register_forward_hook(hook) for each, hook in zip(sources, stage.captures, strict=True)]
    block.khot_stage = stage
    block.__class__ = _patched(type(block), ReducedBlock)


def _width(block: Any, kind: Kind) -> int:
    """The size of a token: queries are made of it."""
    return cast(nn.Linear, projections(getattr(block, kind.attention))[0]).in_features


def _unpatch(module: Any, *names: str) -> None:
    module.__class__ = _original(type(module))
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
