from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from khot.hard import gather_topk
from khot.sampling import sample_topk
from khot.soft import soft_topk

Gradient = Literal["straight", "sample", "gumbel", "soft"]
Score = str | Callable[[Tensor], Tensor]
SCORES = ("cls", "received", "learned", "random")
GRADIENTS = ("straight", "sample", "gumbel", "soft")


class Reduced(NamedTuple):
    """What :class:`TokenTopK` keeps."""

    tokens: Tensor  # (B, P + k, d), one more with fuse
    indices: Tensor  # (B, k), of the kept ones among the candidates


@final
class TokenTopK(nn.Module):
    r"""Keep the k best of N tokens; the first P tokens always stay.

    .. math:: x' = [x_{1..P};\; x_i : i \in \operatorname{top-k}(s)]\quad\text{and with fuse}\quad
        x'_{P+k+1} = \textstyle\sum_{i \notin \operatorname{top-k}} s_i x_i

    Tokens are dropped, not masked, in training too, except with ``gradient="soft"``.

    Args:
        score: ``"cls"`` or ``"received"`` for attention that is given to ``forward``, ``"learned"`` for a small network on the tokens,
            ``"random"``, or a callable ``(tokens) -> (B, N)`` on the N candidates.
        dim: of a token, for ``"learned"``.
        num_prefix: P, the class token, registers and so on.
        fuse: append one token, the sum of the dropped ones weighted by their scores (EViT). Scores that are no attention are passed
            through a softmax first.
        gradient: how a learned score gets its gradient in training: ``"straight"`` (hard top-k, gradient of the soft mask),
            ``"sample"`` (a random k-subset with exact inclusion probabilities), ``"gumbel"`` (Gumbel top-k, as DynamicViT perturbs),
            or ``"soft"`` (no token is dropped, all are multiplied by the soft mask).
        tau: temperature of the soft mask.

    Example:
        >>> tokens, attention = torch.randn(2, 1 + 9, 8), torch.rand(2, 9)
        >>> reduced = TokenTopK()(tokens, 4, attention)
        >>> reduced.tokens.shape, reduced.indices.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 4]))

    Papers: Haurum et al. 2023, "Which Tokens to Use?"; Liang et al. 2022, "Not All Patches Are What You Need" (EViT); Rao et al. 2021,
    "DynamicViT".
    """

    def __init__(
        self,
        *,
        score: Score = "cls",
        dim: int | None = None,
        num_prefix: int = 1,
        fuse: bool = False,
        gradient: Gradient = "straight",
        tau: float = 1.0,
    ) -> None:
        super().__init__()
        if isinstance(score, str) and score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)} or a callable, got {score!r}")
        if not (isinstance(score, str) or callable(score)):
            raise TypeError(f"score must be a name or a callable, got {type(score).__name__}")
        if not tau > 0:
            raise ValueError(f"tau must be positive, got {tau}")
        if gradient not in GRADIENTS:
            raise ValueError(f"gradient must be one of {', '.join(GRADIENTS)}, got {gradient!r}")
        if score == "learned" and dim is None:
            raise ValueError("score='learned' needs dim, the size of a token")
        self.score, self.num_prefix, self.fuse, self.gradient, self.tau = score, num_prefix, fuse, gradient, tau
        self.scorer = _scorer(dim) if score == "learned" and dim is not None else None

    @property
    def needs_attention(self) -> bool:
        """Whether ``forward`` must be given attention."""
        return self.score in ("cls", "received")

    def forward(self, tokens: Tensor, k: int, attention: Tensor | None = None, excluded: Tensor | None = None) -> Reduced:
        """``(B, P + N, d) -> (B, P + k, d)``.

        Args:
            tokens: prefix tokens first.
            k: how many of the N others to keep.
            attention: ``(B, N)``, for the scores ``"cls"`` and ``"received"``.
            excluded: ``(B, N)``, True where a token is padding: it comes after every other.
        """
        prefix, rest = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
        if not 0 < k <= rest.shape[1]:
            raise ValueError(f"k must be between 1 and the {rest.shape[1]} tokens that may be dropped, got {k}")
        scores = self._scores(rest, attention)
        if excluded is not None:
            scores = scores.masked_fill(excluded, -torch.inf)
        if self.training and self.gradient == "soft" and scores.requires_grad:
            return self._all(prefix, rest, soft_topk(scores, k, self.tau), k)
        kept, indices = _take(rest, self._order(scores, k), k)
        parts = [prefix, kept, self._fused(rest, scores, indices)] if self.fuse else [prefix, kept]
        return Reduced(torch.cat(parts, 1), indices)

    def _scores(self, rest: Tensor, attention: Tensor | None) -> Tensor:
        if self.needs_attention:
            if attention is None or attention.shape != rest.shape[:2]:
                came = "none" if attention is None else tuple(attention.shape)
                raise ValueError(f"score={self.score!r} needs attention of shape {tuple(rest.shape[:2])}, got {came}")
            return attention.detach() if attention.requires_grad else attention
        if self.score == "random":
            return torch.rand(rest.shape[:2], dtype=torch.float32, device=rest.device)
        return self._called(self.score, rest) if callable(self.score) else self._learned(rest)

    def _called(self, score: Callable[[Tensor], Tensor], rest: Tensor) -> Tensor:
        scores = score(rest)
        if scores.shape != rest.shape[:2]:
            raise ValueError(f"the callable score must return shape {tuple(rest.shape[:2])}, one number a token, got {tuple(scores.shape)}")
        return scores

    def _learned(self, rest: Tensor) -> Tensor:
        assert self.scorer is not None
        return self.scorer(rest).squeeze(-1).float()

    def _order(self, scores: Tensor, k: int) -> Tensor:
        """What the largest k are taken of: the scores, or a 0/1 mask with a gradient."""
        if not scores.requires_grad:
            return scores
        if not self.training:
            return scores.detach()
        if self.gradient == "straight":
            return soft_topk(scores, k, self.tau, hard=True)
        return sample_topk(scores, k, self.tau, design="gumbel" if self.gradient == "gumbel" else "systematic")

    def _fused(self, rest: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
        weights = scores.detach() if self.needs_attention else scores.detach().softmax(-1)
        weights = weights.scatter(-1, indices, 0.0).clamp(min=0.0)  # the kept ones, and padding, weigh nothing
        return (weights.to(rest.dtype).unsqueeze(1) @ rest).to(rest.dtype)

    def _all(self, prefix: Tensor, rest: Tensor, mask: Tensor, k: int) -> Reduced:
        indices = mask.detach().topk(k).indices
        return Reduced(torch.cat([prefix, rest * mask.to(rest.dtype).unsqueeze(-1)], 1), indices)

    def extra_repr(self) -> str:
        return f"score={self.score!r}, num_prefix={self.num_prefix}, fuse={self.fuse}, gradient={self.gradient!r}, tau={self.tau}"


def _take(rest: Tensor, order: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest by ``order``, with its gradient. Without one ``torch.topk`` serves, which ONNX knows; it knows no stable sort."""
    if order.requires_grad:
        return gather_topk(rest, order, k)
    indices = order.topk(k).indices
    if rest.shape[0] == 1:  # whole rows, without a place for every number of them
        return rest[0].index_select(0, indices[0]).unsqueeze(0), indices
    return rest.gather(1, indices.unsqueeze(-1).expand(-1, -1, rest.shape[-1])), indices


def _scorer(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim // 4), nn.GELU(), nn.Linear(dim // 4, 1))
