from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from khot._tensors import Number
from khot.beams.hard import Beams, Rules, Stop, search
from khot.beams.soft import SoftBeams, SoftRules, relaxed_search
from khot.beams.state import spread

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


@overload
def beam_search(
    step: Step,
    start: Tensor,
    *,
    num_beams: int,
    max_length: int,
    eos: int | Sequence[int] | None = None,
    length_penalty: float = 1.0,
    early_stopping: Stop = False,
    num_return: int | None = None,
    state: Any = None,
    tau: None = None,
    method: str = "softrank",
    embed: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Beams: ...
@overload
def beam_search(
    step: Step,
    start: Tensor,
    *,
    num_beams: int,
    max_length: int,
    eos: int | Sequence[int] | None = None,
    length_penalty: float = 1.0,
    early_stopping: Stop = False,
    num_return: int | None = None,
    state: Any = None,
    tau: Number,
    method: str = "softrank",
    embed: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> SoftBeams: ...
def beam_search(
    step: Step,
    start: Tensor,
    *,
    num_beams: int,
    max_length: int,
    eos: int | Sequence[int] | None = None,
    length_penalty: float = 1.0,
    early_stopping: Stop = False,
    num_return: int | None = None,
    state: Any = None,
    tau: Number | None = None,
    method: str = "softrank",
    embed: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> Beams | SoftBeams:
    r"""The most probable sequences of a model that gives one token after the other.

    Without ``tau`` the search is hard and equals transformers' ``generate``: ``num_beams`` open sequences are extended by all tokens, the
    best stay, those that end are ranked by their log-probability over ``length ** length_penalty``. With ``tau`` it is relaxed (Goyal et
    al. 2018): each place of the beam holds a soft token and a mixture of states, weighted by :func:`khot.soft_topk_matrix`, and the
    gradient of a loss on the beam reaches the scores of all continuations.

    Args:
        step: ``(tokens (B, K), state) -> (log_probs (B, K, V), state)``. The relaxed search gives the start as tokens, too, and after it
            ``embed(weights (B, K, V))``, or the weights themselves.
        start: ``(B,)`` of int64, the token that each sequence starts from.
        num_beams: ``K``.
        max_length: the most tokens, without the start, eos included.
        eos: the token or tokens that end a sequence; None lets all of them run to ``max_length``.
        length_penalty: above 0 favours long sequences; 0 compares sums of log-probabilities.
        early_stopping: False stops when the best open sequence, were it to end now, would not come among the finished; True as soon as
            there are ``num_beams`` finished ones; ``"never"`` when none can come among them whatever follows.
        num_return: how many of the finished sequences to return, at most ``num_beams``, the default.
        state: what the first call of ``step`` gets: tensors ``(B, ...)`` in any nesting of tuples, lists and dicts, given to each beam as
            ``(B, K, ...)``; or an object with a method ``reorder(index (B, K))`` that returns the state of these beams.
        tau: temperature of the relaxed search; None is the hard one.
        method: a matrix method in :data:`khot.RELAXATIONS`, for the relaxed search.
        embed: see ``step``; e.g. ``lambda weights: weights @ embedding.weight``.
        options: the method's own.

    Returns:
        ``sequences (B, N, T)``, ``scores (B, N)``, ``lengths (B, N)``, best first; relaxed: :class:`khot.beams.SoftBeams`.

    Example:
        >>> chain = torch.tensor([[0.0, 0.6, 0.4], [0.5, 0.25, 0.25], [0.95, 0.0, 0.05]]).log()  # 0 ends; the best first step is a trap
        >>> step = lambda tokens, state: (chain[tokens], state)
        >>> beam_search(step, torch.tensor([0]), num_beams=1, max_length=2, eos=0).sequences
        tensor([[[1, 0]]])
        >>> beam_search(step, torch.tensor([0]), num_beams=2, max_length=2, eos=0).sequences
        tensor([[[2, 0],
                 [1, 0]]])
    """
    _check_numbers(num_beams, max_length, num_return, early_stopping)
    if not isinstance(start, Tensor) or start.ndim != 1 or start.is_floating_point() or start.dtype == torch.bool:
        raise ValueError(f"start must be a tensor of token numbers of shape (B,), got {_show(start)}")
    ends = torch.tensor([] if eos is None else [eos] if isinstance(eos, int) else list(eos), dtype=torch.int64, device=start.device)
    checked = _Checked(step, len(start), num_beams, ends)
    state = spread(state, num_beams, len(start))
    if tau is not None:
        return relaxed_search(checked, start, state, SoftRules(num_beams, max_length, ends, tau, method, embed, options))
    if options:
        raise TypeError(f"the hard search has no option {next(iter(options))!r}; methods and their options need tau")
    stop: Stop = True if num_beams == 1 else early_stopping  # one beam is greedy search: it ends where it ends
    found = search(checked, start, state, Rules(num_beams, max_length, ends, float(length_penalty), stop))
    return found if num_return is None else Beams(*(part[:, :num_return] for part in found))


class _Checked:
    """A step whose result has been looked at: its shape in every call, its vocabulary against eos in the first."""

    def __init__(self, step: Step, rows: int, beams: int, ends: Tensor) -> None:
        if not callable(step):
            raise TypeError(f"step must be a callable (tokens, state) -> (log_probs, state), got {type(step).__name__}")
        self.step, self.shape, self.ends = step, (rows, beams), ends

    def __call__(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        made = self.step(tokens, state)
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(f"step must return (log_probs, state), got {type(made).__name__}")
        log_probs, state = made
        if not isinstance(log_probs, Tensor) or log_probs.ndim != 3 or tuple(log_probs.shape[:2]) != self.shape:
            raise ValueError(f"step must return log_probs of shape ({self.shape[0]}, {self.shape[1]}, V), got {_show(log_probs)}")
        if len(self.ends) and not 0 <= int(self.ends.min()) <= int(self.ends.max()) < log_probs.shape[2]:
            raise ValueError(f"eos must be a token from 0 to {log_probs.shape[2] - 1}, got {self.ends.tolist()}")
        return log_probs, state


def _check_numbers(num_beams: int, max_length: int, num_return: int | None, early_stopping: Stop) -> None:
    for name, value in (("num_beams", num_beams), ("max_length", max_length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if num_return is not None and not 1 <= num_return <= num_beams:
        raise ValueError(f"num_return must be between 1 and num_beams={num_beams}, got {num_return}")
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping must be True, False or 'never', got {early_stopping!r}")


def _show(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
