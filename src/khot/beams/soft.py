"""The relaxed search: soft tokens and mixed states, so that a loss sees the whole beam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from khot._tensors import Number
from khot.beams.state import mix
from khot.soft import soft_topk_matrix


class SoftBeams(NamedTuple):
    """Relaxed sequences; place 0 stands for the best."""

    tokens: Tensor  # (B, K, T, V), a distribution over the vocabulary at each place; eos after the end
    scores: Tensor  # (B, K), sums of log-probabilities, mixed like everything else
    open: Tensor  # (B, K), how much of each sequence has not ended

    def expected(self, cost: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        r"""The cost of the beam, ``(B,)``: that of each sequence, weighted by its probability within the beam.

        .. math:: \sum_i \frac{e^{s_i}}{\sum_j e^{s_j}} c_i

        Args:
            cost: ``(B, T, V)`` or ``(T, V)``, a cost for each token at each place, or a function from ``tokens`` to ``(B, K)``.
        """
        if isinstance(cost, Tensor):
            whole = torch.broadcast_to(cost, (len(self.tokens), *self.tokens.shape[2:]))
            each = torch.einsum("bktv,btv->bk", self.tokens, whole)
        else:
            each = cost(self.tokens)
        return (self.scores.softmax(1) * each).sum(1)


class SoftRules(NamedTuple):
    beams: int
    length: int
    ends: Tensor
    tau: Number
    method: str
    embed: Callable[[Tensor], Tensor] | None
    options: dict[str, Any]


class _Now(NamedTuple):
    tokens: Tensor  # (B, K, t, V)
    scores: Tensor  # (B, K)
    open: Tensor  # (B, K)


def relaxed_search(step: Any, start: Tensor, state: Any, rules: SoftRules) -> SoftBeams:
    """Every step weighs all continuations for each of the ``K`` places; beams and states become the weighted means."""
    last: Tensor = start.unsqueeze(1).expand(len(start), rules.beams)
    now: _Now | None = None
    for length in range(rules.length):
        given = last if length == 0 else last if rules.embed is None else rules.embed(last)
        log_probs, state = step(given, state)
        now = _first(now, log_probs, rules)
        now, origin, last = _advance(now, log_probs, rules)
        state = mix(state, origin)
    assert now is not None
    return SoftBeams(*now)


def _first(now: _Now | None, log_probs: Tensor, rules: SoftRules) -> _Now:
    """Before the first token: no tokens, and one beam that counts."""
    if now is not None:
        return now
    rows, k, vocabulary = log_probs.shape
    scores = torch.full((rows, k), -torch.inf, dtype=log_probs.dtype, device=log_probs.device)
    scores[:, 0] = 0.0
    tokens = torch.empty((rows, k, 0, vocabulary), dtype=log_probs.dtype, device=log_probs.device)
    return _Now(tokens, scores, torch.ones((rows, k), dtype=log_probs.dtype, device=log_probs.device))


def _advance(now: _Now, log_probs: Tensor, rules: SoftRules) -> tuple[_Now, Tensor, Tensor]:
    """One token more, how the old beams are mixed ``(B, K, K)``, and the new tokens ``(B, K, V)``."""
    rows, k, vocabulary = log_probs.shape
    log_probs = _with_ended(now, log_probs, rules)
    values = (now.scores.unsqueeze(2) + log_probs).flatten(1)  # (B, K V)
    weights = soft_topk_matrix(values, k, rules.tau, method=rules.method, **rules.options)  # (B, K, K V)
    scores = (weights * values.masked_fill(values == -torch.inf, 0.0).unsqueeze(1)).sum(2)
    joint = weights.reshape(rows, k, k, vocabulary)  # place, old beam, token
    origin, token = joint.sum(3), joint.sum(2)
    history = torch.einsum("bij,bjtv->bitv", origin, now.tokens)
    if len(rules.ends):
        going = 1 - torch.zeros(vocabulary, dtype=joint.dtype, device=joint.device).index_fill(0, rules.ends, 1.0)
        still = torch.einsum("bijv,bj,v->bi", joint, now.open, going)
    else:
        still = torch.einsum("bij,bj->bi", origin, now.open)
    return _Now(torch.cat([history, token.unsqueeze(2)], 2), scores, still), origin, token


def _with_ended(now: _Now, log_probs: Tensor, rules: SoftRules) -> Tensor:
    """A sequence that has ended goes on with eos at no cost; one that has partly ended does so partly."""
    if not len(rules.ends):
        return log_probs
    end = torch.zeros(log_probs.shape[2], dtype=torch.bool, device=log_probs.device)
    end[rules.ends[0]] = True
    going = now.open.clamp(0, 1).unsqueeze(2)
    # 0 + 0 under the logarithm has no derivative: those entries are excluded before it.
    mixed = going * log_probs.exp() + (1 - going) * end
    there = mixed > 0
    return torch.where(there, torch.where(there, mixed, 1.0).log(), -torch.inf)
