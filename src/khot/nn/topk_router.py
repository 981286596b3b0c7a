from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from khot._tensors import in_forward_mode, is_bare, is_traced
from khot.nn.annealing import Annealed, Method, Range, check_count, check_method, check_width, relaxed_mask
from khot.nn.routing import Choice, Gate, Routing
from khot.primitives.select import largest
from khot.sampling import sample


@final
class TopKRouter(Annealed):
    r"""Sends each token to ``k`` of the experts, and learns the choice as well as the weights.

    .. math:: w_e \propto z_e\, e^{l_e}, \qquad z = \text{hard top-}k(l)\text{ with the gradient of the soft one}

    In evaluation this is softmax over the ``k`` largest logits, as in Mixtral; the state is the one parameter ``weight`` of its router,
    so that it takes the place of one. In training a token's choice has a gradient too: the soft mask's, at a temperature that falls from
    ``tau[0]`` to ``tau[1]``. Logits and masks are computed in float32 at least, under autocast too.

    Args:
        dim: width of a token.
        num_experts: how many experts there are.
        k: how many experts a token goes to; with ``choice="expert"``, how many tokens an expert takes.
        tau: temperature, or where it starts and ends, in units of the logits' spread over the batch.
        method: a name in :data:`khot.RELAXATIONS` or a callable ``(scores, k, tau) -> mask``.
        hard: ``False`` trains with the soft mask: a token goes to up to ``slots`` experts.
        design: a name in :data:`khot.DESIGNS`: in training a token's experts are drawn at random, exactly ``k`` of them.
        choice: ``"token"``, or ``"expert"`` for the same call along the tokens: the load is even by construction.
        slots: with ``hard=False``, the most experts a token can have in training; by default ``3 * k``.
        bias: keep a bias per expert that :meth:`update_bias` moves against the load; it counts for the choice and not for the weights.
        until: the share of the training in which the temperature falls.

    Example:
        >>> router = TopKRouter(dim=8, num_experts=4, k=2).eval()
        >>> logits, weights, indices = router(torch.randn(3, 8))
        >>> weights.sum(-1), indices.shape
        (tensor([1., 1., 1.], grad_fn=<SumBackward1>), torch.Size([3, 2]))
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: int,
        *,
        tau: Range = (4.0, 0.5),
        method: Method = "euclidean",
        hard: bool = True,
        design: str | None = None,
        choice: Choice = "token",
        slots: int | None = None,
        bias: bool = False,
        until: float = 0.7,
    ) -> None:
        super().__init__(tau, until)
        check_method(method, design)
        if choice not in ("token", "expert"):
            raise ValueError(f"choice must be 'token' or 'expert', got {choice!r}")
        k = check_count(k, "k", num_experts if choice == "token" else None, "num_experts")
        self.dim, self.num_experts, self.k, self.method, self.hard, self.design = dim, num_experts, k, method, hard, design
        self.choice: Choice = choice
        self.slots = min(num_experts, 3 * k) if slots is None else slots
        if choice == "token" and not k <= self.slots <= num_experts:
            raise ValueError(f"slots must be between k={k} and num_experts={num_experts}, got {slots}")
        self.weight = nn.Parameter(torch.empty(num_experts, dim).uniform_(-1, 1) / math.sqrt(dim))
        self.register_buffer("bias", torch.zeros(num_experts) if bias else None)
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> Gate:
        """``(..., dim)`` -> logits ``(T, E)``, weights and indices ``(T, k)``, with the ``T`` tokens of all leading dimensions."""
        found = self.route(x)
        return Gate(found.logits, found.weights, found.indices)

    def route(self, x: Tensor, group: Any = None) -> Routing:
        """The same with the soft mask, losses and statistics; the logits of a ``group`` of processes have their spread in common."""
        check_width(x, self.dim)
        wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.reshape(-1, self.dim).to(wide), self.weight.to(wide))
            scores = logits if self.bias is None else logits + self.bias
            return self._by_token(logits, scores, group) if self.choice == "token" else self._by_expert(logits, scores)

    @torch.no_grad()
    def update_bias(self, routing: Routing, rate: float = 1e-3) -> None:
        """Raise the bias of experts with less than the mean load and lower the others', then centre it (Wang et al. 2024)."""
        if self.bias is None:
            raise ValueError("this router has no bias; make it with TopKRouter(..., bias=True)")
        load = routing.load.to(self.bias.dtype)
        self.bias += rate * torch.sign(load.mean() - load)
        self.bias -= self.bias.mean()

    def _by_token(self, logits: Tensor, scores: Tensor, group: Any) -> Routing:
        if not self.training:
            indices = largest(scores, self.k)
            return Routing(logits, logits.gather(-1, indices).softmax(-1), indices, _k_hot(logits, indices, -1))
        soft = self._soft(scores, -1, group)
        if not self.hard and self.design is None:
            return self._softly(logits, soft)
        indices = largest(scores if self.design is None else self._drawn(soft), self.k)
        return Routing(logits, _straight_weights(logits, soft, indices), indices, soft)

    def _softly(self, logits: Tensor, soft: Tensor) -> Routing:
        """All experts in the soft mask's support, the largest ``slots`` of them."""
        indices = largest(soft, self.slots)
        chosen = logits.gather(-1, indices)
        # The largest mask entry belongs to the largest logit: the sum is at least that entry.
        parts = soft.gather(-1, indices) * (chosen - chosen.detach().amax(-1, keepdim=True)).exp()
        return Routing(logits, parts / parts.sum(-1, keepdim=True), indices, soft)

    def _by_expert(self, logits: Tensor, scores: Tensor) -> Routing:
        if self.k > logits.shape[0]:
            raise ValueError(f"each expert takes k={self.k} tokens, but there are only {logits.shape[0]}; lower k or use larger batches")
        soft = self._soft(scores, 0) if self.training else None
        drawn = scores if soft is None or self.design is None else self._drawn(soft, 0)
        indices = largest(drawn.mT, self.k).mT  # (k, E)
        weights = logits.softmax(-1).gather(0, indices)
        if soft is None:
            return Routing(logits, weights.mT, indices.mT, _k_hot(logits, indices, 0), "expert")
        chosen = soft.gather(0, indices)
        gate = 1 + (chosen - chosen.detach()) if self.hard or self.design is not None else chosen
        return Routing(logits, (weights * gate).mT, indices.mT, soft, "expert")

    def _soft(self, scores: Tensor, dim: int, group: Any = None) -> Tensor:
        return relaxed_mask(scores, self.k, self.tau, method=self.method, dim=dim, group=group)

    def _drawn(self, soft: Tensor, dim: int = -1) -> Tensor:
        assert self.design is not None
        return sample(soft.detach(), design=self.design, dim=dim, k=self.k)

    def extra_repr(self) -> str:
        kind = f"method={self.method!r}, hard={self.hard}, design={self.design!r}, choice={self.choice!r}"
        return f"dim={self.dim}, num_experts={self.num_experts}, k={self.k}, {kind}"


def _straight_weights(logits: Tensor, soft: Tensor, indices: Tensor) -> Tensor:
    """Softmax over the chosen, with the gradient of ``z_e exp(l_e) / sum_i z_i exp(l_i)`` for a soft mask ``z`` over all experts.

    The largest of the chosen logits is taken off before the exponential, so that the sum is at least 1.
    """
    picked, gate = logits.gather(-1, indices), soft.gather(-1, indices)
    top = picked.detach().amax(-1, keepdim=True)
    chosen = (picked - top).exp()
    total = chosen.sum(-1, keepdim=True) + _others(soft, logits.detach(), top)
    return chosen * (1 + (gate - gate.detach())) / total


def _others(soft: Tensor, logits: Tensor, top: Tensor) -> Tensor:
    """0, with the gradient that ``sum_i z_i exp(l_i - top)`` has in the mask z."""
    if is_traced() or in_forward_mode() or not is_bare(soft):
        rest = torch.linalg.vecdot(soft, _below(logits, top)).unsqueeze(-1)
        return rest - rest.detach()
    return _Others.apply(soft, logits, top)  # pyright: ignore[reportReturnType]


def _below(logits: Tensor, top: Tensor) -> Tensor:
    """A logit that was not chosen may be larger than all that were, by a bias or a draw; it counts as the largest of them."""
    return (logits - top).clamp(max=0.0).exp()


class _Others(Function):
    """The exponentials are taken on the way back only."""

    @staticmethod
    def forward(ctx: Any, soft: Tensor, logits: Tensor, top: Tensor) -> Tensor:
        ctx.save_for_backward(logits, top)
        return torch.zeros_like(top)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * _below(*ctx.saved_tensors), None, None


def _k_hot(logits: Tensor, indices: Tensor, dim: int) -> Tensor:
    return torch.zeros_like(logits).scatter(dim, indices, 1.0)
