# pyright: strict
"""What an editor and a type checker know of the public functions: this file is checked in strict mode, and never run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import khot
from khot.hard import Gathered


def functions(scores: Tensor, items: Tensor) -> None:
    assert_type(khot.counting_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.entmax_topk(scores, 2, 0.5, dim=-1), Tensor)
    assert_type(khot.euclidean_topk(scores, 2, 0.5, dim=-1), Tensor)
    assert_type(khot.gaussian_topk(scores, 2, 0.5, dim=-1), Tensor)
    assert_type(khot.halving_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.iterative_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.laplace_topk(scores, 2, 0.5, dim=-1), Tensor)
    assert_type(khot.log_soft_topk(scores, 2, 0.5), Tensor)
    assert_type(khot.magnitude_topk(scores, 2, 0.5, dim=-1), Tensor)
    assert_type(khot.network_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.neuralsort_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.permutahedron_topk(scores, 2, 0.5, dim=-1), Tensor)
    assert_type(khot.perturbed_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.sample(scores, design="systematic", dim=-1), Tensor)
    assert_type(khot.sample_topk(scores, 2, 0.5, method="sigmoid", design="systematic", dim=-1), Tensor)
    assert_type(khot.scaled_topk(scores, 2, 0.5, dim=-1), Tensor)
    assert_type(khot.select_topk(items, scores, 2, 0.5, method="halving", hard=True), Tensor)
    assert_type(khot.sequential_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.sigmoid_topk(scores, 2, 0.5, dim=-1), Tensor)
    assert_type(khot.sinkhorn_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.soft_rank(scores, 0.5, descending=True, regularization="l2", dim=-1), Tensor)
    assert_type(khot.soft_sort(scores, 0.5, descending=True, regularization="kl", dim=-1), Tensor)
    assert_type(khot.soft_topk(scores, 2.5, 0.5, method="sigmoid", hard=True, largest=False, dim=-1), Tensor)
    assert_type(khot.soft_topk_matrix(scores, 2, 0.5, method="softrank", hard=True), Tensor)
    assert_type(khot.softrank_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.softsort_matrix(scores, 2, 0.5), Tensor)
    assert_type(khot.straight_through(scores, scores), Tensor)
    assert_type(khot.threshold_topk(scores, 2, 0.5, dim=-1), Tensor)
    assert_type(khot.topk_inverse(scores, 0.5), Tensor)
    assert_type(khot.topk_loss(scores, scores, 0.5, method="sigmoid", reduction="mean"), Tensor)
    assert_type(khot.topk_mask(scores, 2, dim=-1), Tensor)
    assert_type(khot.topk_value(scores, 2, 0.5), Tensor)
    assert_type(khot.gather_topk(items, scores, 2, dim=-2), Gathered)
    assert_type(khot.gather_topk(items, scores, 2).indices, Tensor)
    assert_type(khot.select_topk_with_indices(items, scores, 2), Gathered)
    assert_type(khot.certify_topk(scores, scores, 2).kept, Tensor)


def models(model: nn.Module) -> None:
    khot.reduce_tokens(model, keep=0.7, at=(3, 6, 9))
    khot.restore_tokens(model)


def modules() -> nn.Module:
    return nn.Sequential(khot.nn.SoftTopK(2, 0.5, method="entmax", hard=True), khot.nn.SampleTopK(2), khot.nn.DifferentiableTopK(2))


def a_method_of_ones_own(scores: Tensor, k: float, tau: float) -> Tensor:
    return torch.sigmoid(scores / tau)


def a_step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    return torch.zeros(*tokens.shape, 5), state


def callables(scores: Tensor) -> None:
    assert_type(khot.soft_topk(scores, 2, method=a_method_of_ones_own), Tensor)
    start = torch.zeros(2, dtype=torch.long)
    assert_type(khot.beam_search(a_step, start, num_beams=2, max_length=3).sequences, Tensor)
    assert_type(khot.beam_search(a_step, start, num_beams=2, max_length=3, tau=0.5).tokens, Tensor)
    assert_type(khot.estimators.straight_through(lambda z: z.sum(-1), scores, 2), Tensor)
    assert_type(khot.RELAXATIONS["sigmoid"].sums_to_k, bool)
