"""A short run of the fuzzer; ``make fuzz`` takes minutes."""

from __future__ import annotations

import random

import torch

import khot
from tests import fuzz


def test_no_hostile_row_breaks_a_promise() -> None:
    tried, found = fuzz.run(seconds=60, seed=7, cases=400)
    assert tried >= 400
    assert not found, "\n".join(found)


def test_the_fuzzer_finds_what_is_wrong() -> None:
    """It sees a sum that is off, and a gradient that is not finite."""
    row = khot.RELAXATIONS["sigmoid"]
    case = fuzz.Case(row, "normal", torch.float32, 7, 3, 1.0, True, 0)
    assert not fuzz.failures(case)
    assert fuzz.draw(random.Random(0), row) == fuzz.draw(random.Random(0), row)

    def off(scores: torch.Tensor, k: float, tau: float = 1.0, **_: object) -> torch.Tensor:
        return torch.sigmoid(scores / tau) + torch.where(scores == scores.amax(), scores / 0, 0.0)

    broken = fuzz.Case(_with_topk(row, off), "normal", torch.float32, 7, 3, 1.0, True, 0)
    assert {"value not finite", "gradient not finite"} <= set(fuzz.failures(broken))


def _with_topk(row: khot.registry.Relaxation, topk: object) -> khot.registry.Relaxation:
    values = {**vars(row), "name": "broken", "topk": topk}
    return type(row)(**values)
