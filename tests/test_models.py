"""The image models: sizes, what they compute against slow references, what they refuse."""

import pytest
import torch
from torch import Tensor, nn

import khot
from khot.models import MODELS, PRESETS, ViT, count_parameters, create_model, off_diagonal_shares, set_tau_scale
from khot.models.blocks import AttentionBlock, DynamicBlock
from khot.models.select import Selection

TOPK = [name for name in MODELS if name.startswith("topk")]


def tiny(name: str, **overrides: object) -> nn.Module:
    sizes = {"dim": 32, "depth": 2} | ({"k": 6, "num_heads": 4} if name in TOPK and name != "topk" else {})
    return create_model(name, preset="tiny", **(sizes | {"num_heads": 2} if name == "vit" else sizes) | overrides)


@pytest.mark.parametrize(("name", "millions"), [("topk_dynamic", 4.19), ("topk_attention", 3.67)])
def test_parameter_counts_are_the_published_ones(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = create_model(name, dim=128, k=96, image_size=224, num_classes=1000)
    assert abs(count_parameters(model) / 1e6 / millions - 1) < 0.01


@pytest.mark.parametrize("preset", PRESETS)
def test_controls_are_of_equal_size(preset: str) -> None:
    with torch.device("meta"):
        sizes = {name: count_parameters(create_model(name, preset=preset)) for name in ("topk_dynamic", "vit", "mixer")}
    assert max(sizes.values()) / min(sizes.values()) < 1.05, sizes


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_and_every_parameter_gets_a_gradient(name: str) -> None:
    model = tiny(name)
    images, labels = torch.randn(8, 1, 28, 28), torch.arange(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert not [key for key, value in model.named_parameters() if value.grad is None]
    assert not [key for key, value in model.named_parameters() if not torch.isfinite(value).all()]


@pytest.mark.parametrize("name", TOPK)
@pytest.mark.parametrize("method", [name for name, row in khot.RELAXATIONS.items() if row.matrix is not None])
def test_any_matrix_method(name: str, method: str) -> None:
    out = tiny(name, method=method, depth=1)(torch.randn(2, 1, 28, 28))
    out.sum().backward()
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("name", MODELS)
def test_batch_does_not_matter_and_state_dict_round_trips(name: str) -> None:
    model, other = tiny(name).eval(), tiny(name).eval()
    images = torch.randn(3, 1, 28, 28)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(images), model(images))
    torch.testing.assert_close(torch.cat([model(image[None]) for image in images]), model(images), rtol=1e-4, atol=1e-5)


def test_selection_is_the_relaxation_of_scores_in_units_of_ranks() -> None:
    select, scores = Selection(3, method="softsort").double(), torch.randn(2, 7, dtype=torch.float64)
    z = (scores - scores.mean(-1, keepdim=True)) / (scores.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = khot.softsort_matrix((z * (torch.arange(7.0).var(correction=0).sqrt())).float(), 3, 0.5)
    torch.testing.assert_close(select(scores), expected, rtol=1e-4, atol=1e-5)


def test_dynamic_block_against_loops() -> None:
    block, x = DynamicBlock(8, 5, 3, num_heads=2), torch.randn(2, 5, 8)
    for b in range(2):
        inner = block.token_norm(block.expand(x[b]))  # (N, 16)
        mixed = nn.functional.gelu(block.token_mix.weight @ inner + block.token_mix.bias[:, None])
        heads = []
        for part in mixed.chunk(2, -1):
            both = block.score_value(part)
            score, value = both[:, 0], both[:, 1:]
            gathered = block.select(score) @ value
            heads.append(torch.softmax(value @ gathered.T / 8**0.5, -1) @ gathered)
        torch.testing.assert_close(block(x)[b], block.out(torch.cat(heads, -1)), rtol=1e-4, atol=1e-5)


def mixes(block: nn.Module, x: Tensor) -> bool:
    """Whether a change of token 0 reaches another token."""
    jacobian = torch.autograd.functional.jacobian(lambda t: block(t).sum((0, 2)), x)  # (N, 1, N, dim)
    return bool((jacobian[1:, 0, 0].abs() > 1e-6).any())


def test_attention_block_mixes_by_softness_alone() -> None:
    x = torch.randn(1, 6, 8)
    soft = AttentionBlock(8, 3, num_heads=2)
    assert mixes(soft, x)
    weights = khot.hard.topk_matrix(torch.randn(1, 6), 3)
    product = weights.transpose(1, 2) @ weights
    torch.testing.assert_close(product, torch.diag_embed(product.diagonal(dim1=1, dim2=2)))


def test_the_control_has_the_value_of_the_hard_limit() -> None:
    torch.manual_seed(1)
    x, hard = torch.randn(2, 6, 8), AttentionBlock(8, 3, num_heads=2, hard=True)
    control = AttentionBlock(8, 3, num_heads=2, mix="none")
    control.load_state_dict(hard.state_dict())
    torch.testing.assert_close(control(x), hard(x))


def test_off_diagonal_share_against_the_matrix_and_in_the_limit() -> None:
    model, images = tiny("topk_attention"), torch.randn(2, 1, 28, 28)
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Selection):
            module.register_forward_hook(lambda _m, _i, weights: seen.append(weights))
    shares = off_diagonal_shares(model, images)
    for share, weights in zip(shares, seen, strict=True):
        product = weights.transpose(-1, -2) @ weights
        assert share == pytest.approx(1 - float(product.diagonal(dim1=-2, dim2=-1).sum() / product.sum()), abs=1e-5)
    set_tau_scale(model, 1e-4)
    assert max(off_diagonal_shares(model, images)) < 0.05 < min(shares)


def test_temperature_stays_in_its_range() -> None:
    select = Selection(2)
    for logit, tau in ((-50.0, 0.2), (0.0, 0.5), (50.0, 0.99)):
        select.logit_tau.data.fill_(logit)
        assert select.tau().item() == pytest.approx(tau)


def test_vit_reads_a_deit_checkpoint_at_another_resolution() -> None:
    big = ViT(image_size=32, patch_size=4, dim=16, depth=2, num_heads=2, num_classes=7)
    small = ViT(image_size=16, patch_size=4, dim=16, depth=2, num_heads=2, num_classes=3)
    head = small.head.weight.clone()
    assert small.load_pretrained({"model": big.state_dict()}) is small
    assert torch.equal(small.blocks[1].attn.qkv.weight, big.blocks[1].attn.qkv.weight)
    assert torch.equal(small.pos_embed[:, 0], big.pos_embed[:, 0])
    assert torch.equal(small.head.weight, head)
    again = ViT(image_size=32, patch_size=4, dim=16, depth=2, num_heads=2, num_classes=7).load_pretrained(big.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), big(images))


def test_conv_stem_and_mean_pool() -> None:
    model = ViT(image_size=32, patch_size=8, dim=24, depth=1, num_heads=2, num_classes=5, stem="conv", pool="mean")
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: create_model("vitt"), "did you mean 'vit'"),
        (lambda: create_model("vit", preset="huge"), "unknown preset"),
        (lambda: create_model("topk_dynamic", preset="tiny", k=50), "number of tokens, 49, got 50"),
        (lambda: create_model("topk_dynamic", preset="tiny", k=0), "number of tokens, 49, got 0"),
        (lambda: create_model("topk_dynamic", preset="tiny", k=1.5), "number of tokens, 49, got 1.5"),
        (lambda: create_model("vit", preset="tiny", depth=0), "depth must be a whole number of at least 1, got 0"),
        (lambda: create_model("topk", preset="tiny", method="sigmoid"), "unknown matrix method"),
        (lambda: create_model("topk_attention", preset="tiny", mix="some"), "mix must be"),
        (lambda: create_model("vit", preset="tiny", image_size=30), "multiple of patch_size=4"),
        (lambda: create_model("vit", preset="tiny", num_heads=5), "multiple of num_heads=5"),
        (lambda: create_model("vit", preset="tiny", stem="conv", image_size=36, patch_size=6), "power of two"),
        (lambda: create_model("vit", preset="tiny")(torch.zeros(1, 3, 28, 28)), r"\(B, 1, 28, 28\), got \(1, 3, 28, 28\)"),
        (lambda: set_tau_scale(tiny("topk"), 0.0), "scale must be positive"),
    ],
)
def test_bad_input_says_what_must_hold(call, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
