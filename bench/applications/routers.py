"""The routers that are in use, by their definitions, behind the interface of :class:`khot.nn.TopKRouter`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import khot
from khot.nn import Routing, TopKRouter


class Plain(nn.Module):
    """The common router: softmax, then the k largest, renormalised; the balance loss of Switch, on the full softmax.

    ``sigmoid`` is DeepSeek-V3's: sigmoid scores, and a bias against the load that counts for the choice only.
    """

    choice = "token"

    def __init__(self, dim: int, num_experts: int, k: int, *, sigmoid: bool = False) -> None:
        super().__init__()
        self.inner = TopKRouter(dim, num_experts, k, bias=sigmoid)
        self.num_experts, self.sigmoid = num_experts, sigmoid

    def route(self, x: Tensor) -> Routing:
        logits = x.reshape(-1, x.shape[-1]) @ self.inner.weight.T
        return self._sigmoid(logits) if self.sigmoid else self._softmax(logits)

    def _softmax(self, logits: Tensor) -> Routing:
        probs = logits.softmax(-1)
        indices = probs.topk(self.inner.k).indices
        return Routing(logits, logits.gather(-1, indices).softmax(-1), indices, probs * self.inner.k)

    def _sigmoid(self, logits: Tensor) -> Routing:
        assert self.inner.bias is not None
        probs = torch.sigmoid(logits)
        indices = (probs + self.inner.bias).topk(self.inner.k).indices
        log = nn.functional.logsigmoid(logits.gather(-1, indices))
        routing = Routing(logits, log.softmax(-1), indices, khot.topk_mask(probs.detach(), self.inner.k))
        if self.training:
            self.inner.update_bias(routing, 1e-3)
        return routing


class Shrinking(nn.Module):
    """Softmax routing whose k falls from 6 to 2 over the first 70 %."""

    choice = "token"

    def __init__(self, dim: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.plain, self.num_experts, self.k = Plain(dim, num_experts, k), num_experts, k

    def route(self, x: Tensor) -> Routing:
        falling = round(3 * self.k - 2 * self.k * min(1.0, self.plain.inner.progress / 0.7))
        self.plain.inner.k = max(self.k, falling) if self.training else self.k
        return self.plain.route(x)


class Rectified(nn.Module):
    """ReMoE (Wang et al. 2025): gates are relu(logits), and an L1 penalty that adapts holds their number at k on average.

    After each step the penalty's weight is multiplied by 1.2 if more than k experts were active for a token, and divided by it if fewer;
    an expert's gates count in proportion to its load, which balances.
    """

    choice = "token"

    def __init__(self, dim: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.inner = TopKRouter(dim, num_experts, k)
        self.num_experts, self.k, self.strength = num_experts, k, 1e-8

    def route(self, x: Tensor) -> Routing:
        logits = x.reshape(-1, x.shape[-1]) @ self.inner.weight.T
        gates = logits.relu()
        return Routing(logits, gates, torch.arange(self.num_experts, device=x.device).expand_as(gates), gates)

    def penalty(self, routing: Routing) -> Tensor:
        """Call it once a step: it moves its weight."""
        tokens = routing.logits.shape[0]
        share = routing.load.to(routing.mask.dtype) * self.num_experts / (self.k * tokens)
        self.strength *= 1.2 if float(routing.load.sum()) > self.k * tokens else 1 / 1.2
        return self.strength * (share * routing.mask.mean(0)).sum()
