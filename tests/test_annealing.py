"""The schedule, the spread, learned k and the feature selector."""

import pytest
import torch
from torch import nn

import khot
from khot.nn import FeatureSelector, LearnedK, anneal
from khot.nn.annealing import cubic, geometric, relaxed_mask, spread


def test_anneal_reaches_every_layer_and_nothing_else() -> None:
    model = nn.Sequential(FeatureSelector(5, k=2, tau=(2.0, 0.5)), nn.Sequential(nn.Linear(5, 5), FeatureSelector(5, k=1, tau=0.3)))
    anneal(model, 0.25)
    assert model[0].tau == 1.0 and not model[0].settled
    anneal(model, 0.5)
    assert model[0].tau == 0.5 and model[0].settled
    assert model[1][1].tau == pytest.approx(0.3) and "0.tau" not in model.state_dict()


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_progress_is_a_share(bad: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        anneal(nn.Linear(2, 2), bad)


def test_anneal_wants_a_module() -> None:
    with pytest.raises(TypeError, match="Module"):
        anneal([nn.Linear(2, 2)], 0.5)  # type: ignore[arg-type]


def test_schedules_have_their_ends() -> None:
    for schedule in (geometric, cubic):
        values = [schedule((4.0, 0.25), part) for part in (0.0, 0.25, 0.5, 1.0, 2.0)]
        assert values[0] == 4 and values[-1] == values[-2] == 0.25 and values == sorted(values, reverse=True)
    assert geometric((4.0, 0.25), 0.5) == 1


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_spread_is_the_standard_deviation_of_what_is_finite(scale: float) -> None:
    x = torch.randn(50, dtype=torch.float64)
    y = torch.cat([x * scale, torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=torch.float64)])
    torch.testing.assert_close(spread(y), x.std(correction=0) * scale)
    assert spread((x * scale).float()) == pytest.approx(float(x.std(correction=0)) * scale, rel=1e-5)


def test_spread_of_nothing_or_of_equals_is_one() -> None:
    for x in (torch.zeros(0), torch.full((3,), 7.0), torch.full((2,), torch.inf)):
        assert spread(x) == 1 and spread(x, 0.5) == 0.5
    assert spread(torch.tensor([0.0, 1.0]), least=2.0) == 2
    assert spread(torch.randn(4).bfloat16()).dtype == torch.float32


def test_the_relaxed_mask_does_not_depend_on_the_scale() -> None:
    x, tau = torch.randn(4, 9, dtype=torch.float64), torch.tensor(0.3)
    want = khot.soft_topk(x / x.std(correction=0), 3, 0.3)
    for scale in (1e-6, 1.0, 1e6):
        torch.testing.assert_close(relaxed_mask(scale * x + 5 * scale, 3, tau, method="sigmoid"), want, rtol=1e-6, atol=1e-6)
    by_hand = relaxed_mask(x, 3, tau, method=lambda s, k, t: khot.sigmoid_topk(s, k, t))
    torch.testing.assert_close(by_hand, relaxed_mask(x, 3, tau, method="sigmoid"))


def test_learned_k_keeps_its_mean_and_moves_its_rows() -> None:
    learned = LearnedK(4, mean=3, high=8)
    x = torch.randn(256, 4)
    optimizer = torch.optim.Adam(learned.parameters(), lr=0.05)
    target = torch.where(x[:, 0] > 0, 5.0, 1.5)
    for _ in range(200):
        k = learned(x)
        loss = (k - target).square().mean() / 10 + 10 * learned.penalty(k)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    k = learned(x).detach()
    assert k.mean().item() == pytest.approx(3.0, abs=0.2) and k[x[:, 0] > 0.5].min() > k[x[:, 0] < -0.5].max()
    assert k.min() >= 1 and k.max() <= 8


def test_learned_k_gives_k_a_gradient_through_a_mask() -> None:
    learned = LearnedK(6, mean=2)
    x = torch.randn(5, 6)
    khot.soft_topk(x, learned(x), 0.5).square().sum().backward()
    assert learned.weight.grad is not None and learned.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{"mean": 1}, {"mean": 5, "high": 4}, {"mean": 2, "low": -1}])
def test_learned_k_wants_room_on_both_sides(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="low < mean < high"):
        LearnedK(3, **options)


def test_the_selector_finds_the_features_that_matter() -> None:
    x = torch.randn(512, 20)
    y = x[:, 3] * x[:, 7] + x[:, 11]
    model = nn.Sequential(FeatureSelector(20, k=3), nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    scores = [model[0].scores]
    rest = [p for name, p in model.named_parameters() if name != "0.scores"]
    optimizer = torch.optim.Adam([{"params": rest, "lr": 0.01}, {"params": scores, "lr": 0.1}])
    for step in range(400):
        anneal(model, step / 400)
        loss = (model(x).squeeze(-1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model[0].indices.tolist() == [3, 7, 11]
    frozen = model[0].scores.grad
    assert frozen is None or not frozen.any()  # after `until` the choice is fixed


def test_always_counts_among_k_and_is_never_lost() -> None:
    layer = FeatureSelector(6, k=2, always=[4])
    with torch.no_grad():
        layer.scores.copy_(torch.tensor([0.0, 9.0, 1.0, 2.0, -50.0, 3.0]))
    assert layer.indices.tolist() == [1, 4]
    assert layer.probabilities[4] == 1 and layer.probabilities.sum().item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 7}, "between 1 and num_features=6"),
        ({"k": 0}, "between 1"),
        ({"k": 2, "always": [6]}, "always must name"),
        ({"k": 2, "always": [1, 1]}, "different"),
        ({"k": 1, "always": [1, 2]}, "more than k=1"),
        ({"k": 2, "tau": (1.0, 0.0)}, "tau must be"),
        ({"k": 2, "until": 0.0}, "until must lie"),
        ({"k": 2, "method": "sigmod"}, "did you mean 'sigmoid'"),
        ({"k": 2, "design": "sistematic"}, "unknown design"),
    ],
)
def test_selector_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureSelector(6, **options)


def test_method_must_be_a_name_or_callable() -> None:
    with pytest.raises(TypeError, match="callable"):
        FeatureSelector(6, 2, method=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name"):
        FeatureSelector(6, 2, method=khot.sigmoid_topk, design="systematic")
