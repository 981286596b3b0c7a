"""The search itself: the best continuations of all beams, and the best finished sequences so far."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from khot.beams.state import reorder, take

Stop = bool | Literal["never"]


class Beams(NamedTuple):
    """Finished sequences, best first."""

    sequences: Tensor  # (B, N, T) of int64, without the start; after the end they are filled with eos, or -1 where there is none
    scores: Tensor  # (B, N): sum of log-probabilities over length ** length_penalty; -inf where there are fewer than N sequences
    lengths: Tensor  # (B, N), eos included


class Rules(NamedTuple):
    beams: int
    length: int
    ends: Tensor  # (E,), the tokens that end a sequence
    penalty: float
    stop: Stop


class _Open(NamedTuple):
    tokens: Tensor  # (B, K, t)
    scores: Tensor  # (B, K), sums of log-probabilities


def search(step: Any, start: Tensor, state: Any, rules: Rules) -> Beams:
    """Keep ``K`` open sequences and the ``K`` best finished ones until no open one can come among these."""
    rows, device, k = len(start), start.device, rules.beams
    scores = torch.full((rows, k), -torch.inf, dtype=torch.float32, device=device)
    scores[:, 0] = 0.0  # all beams start as the same sequence: only one of them counts
    open_ = _Open(torch.empty((rows, k, 0), dtype=torch.int64, device=device), scores)
    done = Beams(
        _filler(rules, (rows, k, rules.length), device),
        torch.full((rows, k), -torch.inf, dtype=torch.float32, device=device),
        torch.zeros((rows, k), dtype=torch.int64, device=device),
    )
    last, alive = start.unsqueeze(1).expand(rows, k), torch.ones(rows, dtype=torch.bool, device=device)
    for length in range(1, rules.length + 1):
        log_probs, state = step(last, state)
        open_, done, origin = _advance(open_, done, log_probs, rules, length, alive)
        alive = alive & _can_improve(open_, done, rules, length)
        if length == rules.length or not bool(alive.any()):
            break
        last, state = open_.tokens[..., -1], state if _in_order(origin) else reorder(state, origin)
    return done._replace(sequences=done.sequences[..., : max(1, int(done.lengths.max()) if rows else 1)])


def _in_order(origin: Tensor) -> bool:
    """Whether every beam goes on from itself: its state, which may be a large cache, can stay where it is."""
    return bool((origin == torch.arange(origin.shape[1], dtype=torch.long, device=origin.device)).all())


def _advance(open_: _Open, done: Beams, log_probs: Tensor, rules: Rules, length: int, alive: Tensor) -> tuple[_Open, Beams, Tensor]:
    """One token more: new open sequences, new finished ones, and the beam that each open one comes from."""
    _, k, vocabulary = log_probs.shape
    # So many candidates that k of them are open even if every end is among the best of each beam; one beam ends with the first.
    width = min(max(2, 1 + len(rules.ends)) * k, k * vocabulary) if k > 1 else 1
    scores = (open_.scores.unsqueeze(2) + log_probs.float()).flatten(1)
    values, places = scores.topk(width, dim=1) if k > 1 else scores.max(1, keepdim=True)
    origin, token = places // vocabulary, places % vocabulary
    tokens = torch.cat([take(open_.tokens, origin), token.unsqueeze(2)], 2)  # (B, width, t + 1)
    ended = torch.isin(token, rules.ends) | (length == rules.length)
    kept = torch.arange(width, dtype=torch.long, device=token.device) < k  # only these can finish
    counted = ended & kept & alive.unsqueeze(1)
    if bool(counted.any()):
        done = _merge(done, tokens, values.masked_fill(~counted, -torch.inf) / length**rules.penalty, rules, length)
    kept_values, kept = values.masked_fill(ended, -torch.inf).topk(min(k, width), dim=1)
    if kept.shape[1] < k:  # fewer candidates than beams: the vocabulary is that small
        kept_values = torch.nn.functional.pad(kept_values, (0, k - kept.shape[1]), value=-torch.inf)
        kept = torch.nn.functional.pad(kept, (0, k - kept.shape[1]))
    return _Open(take(tokens, kept), kept_values), done, origin.gather(1, kept)


def _merge(done: Beams, tokens: Tensor, scores: Tensor, rules: Rules, length: int) -> Beams:
    """The best ``K`` of what was finished before and what has just been; the earlier one wins a tie."""
    filled = _filler(rules, (*tokens.shape[:2], rules.length), tokens.device)
    filled[..., :length] = tokens
    all_scores = torch.cat([done.scores, scores], 1)
    best, index = all_scores.topk(rules.beams, dim=1)
    sequences = take(torch.cat([done.sequences, filled], 1), index)
    lengths = torch.cat([done.lengths, torch.full(scores.shape, length, dtype=torch.int64, device=scores.device)], 1).gather(1, index)
    return Beams(sequences, best, lengths.masked_fill(best == -torch.inf, 0))


def _filler(rules: Rules, shape: tuple[int, ...], device: torch.device) -> Tensor:
    fill = int(rules.ends[0]) if len(rules.ends) else -1
    return torch.full(shape, fill, dtype=torch.int64, device=device)


def _can_improve(open_: _Open, done: Beams, rules: Rules, length: int) -> Tensor:
    """Whether an open sequence may still come among the finished ones, ``(B,)``."""
    full = done.scores[:, -1] > -torch.inf
    if rules.stop is True:
        return ~full
    best_length = rules.length if rules.stop == "never" and rules.penalty > 0 else length
    best = open_.scores[:, 0] / best_length**rules.penalty
    return (best > -torch.inf) & (~full | (best > done.scores[:, -1]))
