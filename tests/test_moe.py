"""Routers and mixtures of experts against a loop over tokens, and inside transformers' own block."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import khot
from khot.nn import MoE, Routing, StackedFeedForward, TopKRouter
from khot.nn.experts import grouped_matmul
from khot.nn.topk_router import _straight_weights


def dense(moe: MoE, x: Tensor, routing: Routing) -> Tensor:
    """Slow oracle: every token through every expert, one at a time."""
    shares = torch.zeros_like(routing.logits)
    for row, (indices, weights) in enumerate(zip(routing.indices, routing.weights, strict=True)):
        for index, weight in zip(indices, weights, strict=True):
            place = (row, index) if routing.choice == "token" else (index, row)
            shares[place] += weight
    outs = torch.stack([one(moe, x, e) for e in range(moe.router.num_experts)], 1)
    return (outs * shares.unsqueeze(-1)).sum(1)


def one(moe: MoE, x: Tensor, expert: int) -> Tensor:
    if isinstance(moe.experts, nn.ModuleList):
        return moe.experts[expert](x)
    gate, up = (x @ moe.experts.up[expert]).chunk(2, -1)
    return (F.silu(gate) * up) @ moe.experts.down[expert]


def make(stacked: bool, *, capacity: float | None = None, dim: int = 8, hidden: int = 16, k: int = 2, **options: Any) -> MoE:
    listed = [nn.Sequential(nn.Linear(dim, 6), nn.ReLU(), nn.Linear(6, dim)) for _ in range(4)]
    return MoE(TopKRouter(dim, 4, k, **options), StackedFeedForward(4, dim, hidden) if stacked else listed, capacity=capacity)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("capacity", [None, 0.6])
@pytest.mark.parametrize("options", [{}, {"hard": False}, {"design": "systematic"}, {"choice": "expert", "k": 5}, {"bias": True}], ids=str)
def test_dispatch_equals_the_loop_over_tokens(stacked: bool, capacity: float | None, options: dict) -> None:
    moe, x = make(stacked, capacity=capacity, **options), torch.randn(11, 8)
    for mode in (True, False):
        y, routing = moe.train(mode)(x)
        torch.testing.assert_close(y, dense(moe, x, routing), rtol=1e-4, atol=1e-5)
    assert routing.stats()["experts_used"] >= 1


def test_gradients_equal_those_of_the_loop() -> None:
    moe, x = make(True, dim=7, hidden=5).double(), torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    y, routing = moe(x)
    weight = torch.randn_like(y)
    inputs = [x, *moe.parameters()]
    got = torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True)
    want = torch.autograd.grad((dense(moe, x, routing) * weight).sum(), inputs)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(8, 16), (7, 5)])
def test_grouped_products_with_empty_experts_and_expanded_gradients(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows = torch.randn(6, shape[0], dtype=dtype, requires_grad=True)
    weights = torch.randn(4, *shape, dtype=dtype, requires_grad=True)
    out = grouped_matmul(rows, weights, torch.tensor([0, 4, 4, 6]))
    torch.testing.assert_close(out, torch.cat([rows[:4] @ weights[1], rows[4:] @ weights[3]]))
    out.sum().backward()  # an expanded gradient
    assert not weights.grad[0].any() and weights.grad[1].any() and rows.grad.isfinite().all()


def test_evaluation_is_softmax_over_the_largest() -> None:
    router, x = TopKRouter(8, 6, k=3).eval(), torch.randn(4, 5, 8)
    logits, weights, indices = router(x)
    assert logits.shape == (20, 6) and indices.shape == (20, 3)
    probs, best = (x.reshape(-1, 8) @ router.weight.T).softmax(-1).topk(3)
    assert torch.equal(indices, best)
    torch.testing.assert_close(weights, probs / probs.sum(-1, keepdim=True))


def test_training_has_the_value_of_evaluation_and_a_gradient_for_the_choice() -> None:
    router, x = TopKRouter(8, 6, k=2, tau=2.0), torch.randn(30, 8)
    train, test = router(x), router.eval()(x)
    torch.testing.assert_close(train.weights, test.weights)
    assert torch.equal(train.indices, test.indices)
    router.train()
    values = torch.randn(30, 2)
    soft = torch.autograd.grad((router(x).weights * values).sum(), router.weight)[0]
    plain = torch.autograd.grad((plain_weights(x, router) * values).sum(), router.weight)[0]
    assert not torch.allclose(soft, plain)


def test_the_gradient_is_that_of_the_formula_over_all_experts() -> None:
    logits, soft = (torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    indices, values = logits.topk(2).indices, torch.randn(5, 2, dtype=torch.float64)
    got = torch.autograd.grad((_straight_weights(logits, soft, indices) * values).sum(), (logits, soft))
    mask = khot.straight_through(khot.topk_mask(logits, 2), soft)
    parts = mask * logits.exp()
    want = torch.autograd.grad(((parts / parts.sum(-1, keepdim=True)).gather(-1, indices) * values).sum(), (logits, soft))
    torch.testing.assert_close(got, want)


def plain_weights(x: Tensor, router: TopKRouter) -> Tensor:
    logits = x @ router.weight.T
    return logits.gather(-1, logits.topk(router.k).indices).softmax(-1)


def test_soft_gates_reach_more_experts_and_shrink_with_the_temperature() -> None:
    router, x = TopKRouter(8, 12, k=2, hard=False, tau=(3.0, 0.02)), torch.randn(200, 8)
    khot.nn.anneal(router, 0.0)
    many = router.route(x).stats()["active"]
    khot.nn.anneal(router, 1.0)
    few = router.route(x).stats()["active"]
    assert many > 4 and 2 <= few < 2.3
    torch.testing.assert_close(router.route(x).weights.sum(-1), torch.ones(200))


def test_huge_logits_and_far_samples_keep_finite_weights() -> None:
    for options in ({}, {"design": "systematic", "tau": 50.0}, {"hard": False}):
        router = TopKRouter(4, 6, k=2, **options)
        with torch.no_grad():
            router.weight.mul_(1e4)
        weights = router(torch.randn(50, 4)).weights
        weights.square().sum().backward()
        assert weights.isfinite().all() and router.weight.grad.isfinite().all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(50))


def test_expert_choice_has_an_even_load() -> None:
    routing = TopKRouter(8, 4, k=5, choice="expert").route(torch.randn(20, 8))
    assert routing.load.tolist() == [5] * 4 and routing.stats()["load_cv"] == 0
    torch.testing.assert_close(routing.mask.sum(0), torch.full((4,), 5.0))
    with pytest.raises(ValueError, match="only 3"):
        TopKRouter(8, 4, k=5, choice="expert").route(torch.randn(3, 8))


def test_balance_loss_is_one_when_even_and_learns_to_balance() -> None:
    logits = torch.eye(4).repeat(3, 1)
    even = Routing(logits, torch.ones(12, 1), torch.arange(4).repeat(3).unsqueeze(-1), logits)
    assert even.balance_loss() == 1 and even.load.tolist() == [3] * 4
    moe, x = make(True), torch.randn(128, 8) + 1.0  # an offset: some experts are preferred
    before = moe(x).routing.stats()["load_cv"]
    optimizer = torch.optim.Adam(moe.router.parameters(), lr=0.02)
    for _ in range(150):
        loss = moe.router.route(x).balance_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert moe(x).routing.stats()["load_cv"] < 0.25 < before


def test_bias_balances_and_stays_centred() -> None:
    router, x = TopKRouter(8, 4, k=1, bias=True).eval(), torch.randn(200, 8) + 1.0
    before = router.route(x).stats()["load_cv"]
    for _ in range(300):
        router.update_bias(router.route(x), rate=0.01)
    assert router.route(x).stats()["load_cv"] < before / 2 and router.bias.sum().abs() < 1e-4
    with pytest.raises(ValueError, match="bias=True"):
        TopKRouter(8, 4, k=1).update_bias(router.route(x))


def test_capacity_drops_the_smallest_weights() -> None:
    moe, x = make(False, capacity=0.5, k=1), torch.randn(40, 8)
    routing = moe(x).routing
    assert routing.load.max() <= 5 and routing.stats()["dropped"] > 0


def test_z_loss_in_log_space() -> None:
    routing = TopKRouter(8, 4, k=1).route(torch.randn(5, 8))
    torch.testing.assert_close(routing.z_loss(), routing.logits.exp().sum(-1).log().square().mean())


def test_takes_the_place_of_mixtrals_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # one that was built for another torch would fail when transformers imports it
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = transformers.MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    block = MixtralSparseMoeBlock(config).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
    x = torch.randn(2, 5, 16)
    want = block(x)
    state = block.gate.state_dict()
    block.gate = TopKRouter(16, 4, k=2).eval()
    block.gate.load_state_dict(state)
    torch.testing.assert_close(block(x), want)
    block.train()
    block(x).square().sum().backward()
    assert block.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: TopKRouter(8, 4, k=5), "between 1 and num_experts=4"),
        (lambda: TopKRouter(8, 4, k=0), "between 1"),
        (lambda: TopKRouter(8, 4, k=2, choice="both"), "choice must be"),
        (lambda: TopKRouter(8, 4, k=2, slots=1), "slots must be"),
        (lambda: TopKRouter(8, 4, k=2, method="euklidean"), "did you mean"),
        (lambda: MoE(TopKRouter(8, 4, k=2), [nn.Linear(8, 8)] * 3), "got 3"),
        (lambda: MoE(TopKRouter(8, 4, k=2), StackedFeedForward(5, 8, 8)), "got 5"),
        (lambda: make(False, capacity=0.0), "capacity must be positive"),
    ],
)
def test_errors(make_it: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()
