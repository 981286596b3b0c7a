"""What a reduced encoder is: the plan of how many tokens each stage keeps, and the blocks that follow it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from khot.models.encoders import Kind, attention_row, padding, take_mask
from khot.nn.token_topk import TokenTopK


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
        self.normed = False  # whether queries and keys have norms of their own
        self.handles: list[Any] = []


class ReducedBlock:
    """Mixin of a patched block: attention, reduction, MLP on what was kept."""

    khot_stage: Stage
    token_topk: TokenTopK

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        stage = self.khot_stage
        if stage.stage == 1:
            stage.plan.num_tokens = x.shape[1] - stage.plan.num_prefix
            if stage.plan.num_tokens < 1:
                raise ValueError(f"num_prefix={stage.plan.num_prefix} leaves none of the {x.shape[1]} tokens to choose from")
        if stage.plan.keep == 1:
            return super().forward(x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        args, kwargs, mask = _reduced_mask(stage, args, kwargs)
        if not stage.stage:
            return super().forward(x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return _forward(self, stage, x, mask, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (original(type(self)), ReducedBlock), self.__dict__


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
        return _rebuild, (original(type(self)), ReducedModel), self.__dict__


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
    row = None
    if stage.captures is not None:
        outputs = [capture.take() for capture in stage.captures]
        attention = getattr(block, stage.kind.attention)
        row = attention_row(attention, chooser.heads, outputs[0], outputs[-1], chooser.score, mask, normed=stage.normed)
        row = row[:, plan.num_prefix :]
    count = plan.count(stage.stage)
    if count >= y.shape[1] - plan.num_prefix:
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
    if not (args or kwargs):
        return args, kwargs, None
    mask = kwargs.get("attention_mask", kwargs.get("attn_mask", args[0] if args else None))
    kept = None if mask is None else stage.plan.kept(stage.after)
    if mask is None or kept is None:
        return args, kwargs, mask
    mask = take_mask(mask, kept.clamp(min=0))
    named = next((name for name in ("attention_mask", "attn_mask") if name in kwargs), None)
    return (args, kwargs | {named: mask}, mask) if named else ((mask, *args[1:]), kwargs, mask)


@functools.cache
def patched(kind: type, mixin: type) -> type:
    """``kind`` with the mixin before it; made once, so that two patched blocks are of one class."""
    return type(kind.__name__, (mixin, kind), {"khot_original": kind, "__module__": kind.__module__})


def original(kind: type) -> type:
    return kind.khot_original  # pyright: ignore[reportAttributeAccessIssue]


def _rebuild(kind: type, mixin: type) -> Any:
    """For pickle and deepcopy: an empty object of the patched class."""
    return object.__new__(patched(kind, mixin))


def check_keep(rate: float) -> float:
    if not isinstance(rate, (int, float)) or not 0 < rate <= 1:
        raise ValueError(f"keep must lie in (0, 1], got {rate!r}")
    return float(rate)
