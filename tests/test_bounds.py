"""Bounds are sound: no sampled, corner or attacking perturbation leaves them; linear forms are never looser than intervals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import khot
from khot import bounds
from khot.bounds import Affine, Box
from tests.bounding import OPERATIONS, WIDE, V, W, gelu, line, perturbed, violations


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("eps", [1e-4, 0.02, 0.3])
def test_no_perturbation_leaves_the_bounds(name: str, eps: float) -> None:
    on_bounds, on_tensors, shape = OPERATIONS[name]
    x = torch.randn(1, *shape)
    values = on_tensors(perturbed(x, eps, 1000))
    box, affine = on_bounds(Box.around(x, eps)), on_bounds(Affine.around(x, eps))
    assert violations(values, box) == violations(values, affine) == 0
    ulps = 1e-14 * (1 + torch.maximum(box.lower.abs(), box.upper.abs()))  # both round, and not at the same places
    assert bool((affine.lower >= box.lower - ulps).all() and (affine.upper <= box.upper + ulps).all()), "looser than intervals"
    assert bool((box.upper - box.lower <= 60 * (values.amax(0) - values.amin(0)).clamp(min=eps)).all()), "a bound that says nothing"


@pytest.mark.parametrize("eps", [1e-4, 0.1])
def test_one_of_several_whichever_it_is(eps: float) -> None:
    x = torch.randn(1, 5, 8)
    points = perturbed(x, eps, 900)
    parts = torch.stack([points, line(points), points.exp()])
    which = torch.randint(0, 3, (900,))
    for count in (2, 3):
        chosen = parts[which % count, torch.arange(900)]
        found = [bounds.gelu(bounds.linear(_one_of(domain.around(x, eps), count), W, V)) for domain in (Box, Affine)]
        assert [violations(gelu(line(chosen)), bound) for bound in found] == [0, 0]
        assert bool((found[1].upper - found[1].lower <= (found[0].upper - found[0].lower) * (1 + 1e-12)).all())


def _one_of(x: Any, count: int) -> Any:
    return x.or_else([bounds.linear(x, W, V), bounds.exp(x).name_slack()][: count - 1]).name_slack()


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_perturbation_the_bounds_are_the_value(name: str) -> None:
    on_bounds, on_tensors, shape = OPERATIONS[name]
    x = torch.randn(1, *shape)
    for domain in (Box, Affine):
        found = on_bounds(domain.around(x, 0.0))
        assert violations(on_tensors(x.to(WIDE)), found) == 0
        assert (found.upper - found.lower).max() < 1e-9


def test_float32_ends_contain_the_float64_value() -> None:
    x = torch.randn(1, 5, 8)
    lower, upper = bounds.linear(Box.around(x, 0.0), W, V).ends(torch.float32)
    exact = line(x.to(WIDE))
    assert bool((lower.to(WIDE) <= exact).all() and (exact <= upper.to(WIDE)).all())
    assert (upper - lower).max() <= 4 * torch.finfo(torch.float32).eps * exact.abs().max()


def members(scores: Tensor, k: int) -> Tensor:
    return khot.topk_mask(scores, k).bool()


@pytest.mark.parametrize("scores", ["normal", "ties", "excluded"])
@pytest.mark.parametrize("domain", [Box, Affine])
def test_what_is_certain_of_a_selection_holds_for_every_perturbation(scores: str, domain: type) -> None:
    for trial in range(20):
        x = torch.randn(1, 12, generator=torch.Generator().manual_seed(trial))
        x = x.round() if scores == "ties" else x
        eps = 0.0 if scores == "ties" and trial % 2 else 0.1
        bound = domain.around(x, eps)
        if scores == "excluded":
            if domain is Affine:
                continue  # -inf is no linear form; a box has it
            gone = torch.arange(12) % 3 == 0
            bound, x = (
                Box(bound.lower.masked_fill(gone, -torch.inf), bound.upper.masked_fill(gone, -torch.inf)),
                x.masked_fill(gone, -torch.inf),
            )
        found = bounds.topk(domain.around(x.nan_to_num(0.0, 0.0, 0.0).unsqueeze(-1), eps), bound, 4)
        sure = set(found.index[0][found.members[0] == 1].tolist())
        possible = set(found.index[0][found.members[0] > 0].tolist())
        for row in members(perturbed(x, eps, 200) if eps else x, 4):
            chosen = set(row.nonzero().flatten().tolist())
            assert sure <= chosen <= possible
            assert len(chosen - sure) == int(found.rest[0])


def test_differences_decide_what_intervals_cannot() -> None:
    shared = torch.randn(1, 1, 6)
    x = Affine.around(torch.cat([shared, torch.zeros(1, 1, 6)], 1), 0.5)
    # every score moves with the same input, so that their order never changes
    scores = x.linear(
        lambda t: t[..., 0, :3].sum(-1, keepdim=True) + torch.tensor([0.0, 0.1, 0.2, 0.3], dtype=WIDE) * t[..., 1, :1], None, 4
    )
    moved = scores.shift(torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=WIDE))
    assert bounds.topk(moved.linear(lambda t: t.unsqueeze(-1)), moved, 2).rest.item() == 0
    assert bounds.topk(moved.box.linear(lambda t: t.unsqueeze(-1)), moved.box, 2).rest.item() > 0


@pytest.mark.parametrize("eps", [0.02, 0.06, 0.15])
@pytest.mark.parametrize("domain", [Box, Affine])
def test_attention_over_an_uncertain_set_contains_every_case(eps: float, domain: type) -> None:
    x = torch.randn(1, 9, 6, generator=torch.Generator().manual_seed(0))
    x[..., 0] *= 0.1
    v = domain.around(x, eps)
    scores, query = v.linear(lambda t: t[..., 0]), v.linear(lambda t: t[..., :1, :])

    def attention(values: Box | Affine, who: Tensor | None = None, rest: Tensor | None = None) -> Box | Affine:
        logits = bounds.matmul(query, values.linear(lambda t: t.mT))
        return bounds.attend(bounds.softmax(logits, None if who is None else who.unsqueeze(1), rest), values, who)

    found = bounds.topk(v, scores, 4)
    whole = attention(found.values, found.members, found.rest)
    cases = [attention(values) for _, values in bounds.enumerate_cases(v, scores, 4)]
    lower, upper = torch.stack([c.lower for c in cases]).amin(0), torch.stack([c.upper for c in cases]).amax(0)
    assert bool((whole.lower <= lower + 1e-9).all() and (whole.upper >= upper - 1e-9).all())
    assert ((whole.upper - whole.lower) / (upper - lower)).mean() <= 2
    points = perturbed(x, eps, 2000)
    kept = members(points[..., 0], 4).unsqueeze(1)
    truth = (points[:, :1] @ points.mT).masked_fill(~kept, -torch.inf).softmax(-1) @ points
    assert violations(truth, whole) == 0
