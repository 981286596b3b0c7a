"""Token reduction: equal to a slow reference on our ViT and on those of timm and transformers, and undone without a trace."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import khot
from khot.models import ViT, count_macs, create_model, reduced
from khot.nn import TokenTopK
from tests.slow_vision import images, slow_vit, vit


@pytest.mark.parametrize("score", ["cls", "received"])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_our_vit_against_the_slow_reference(score: str, fuse: bool, pool: str) -> None:
    model, x = vit(pool=pool), images()
    expected = slow_vit(model, x, keep=0.6, at=(0, 2), score=score, fuse=fuse)
    khot.reduce_tokens(model, 0.6, at=(0, 2), score=score, fuse=fuse)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert {block: kept.shape[1] for block, kept in model.kept_tokens.items()} == {0: 38 + fuse, 2: 23 + fuse}


def test_counts_are_those_of_the_real_number_of_tokens() -> None:
    model = vit(image_size=40)  # 100 patches
    khot.reduce_tokens(model, 0.29, at=(1,))(images(size=40))
    assert model.kept_tokens[1].shape[1] == 29
    model.keep = 0.001
    model(images(size=40))
    assert model.kept_tokens[1].shape[1] == 1


def test_kept_tokens_are_places_in_the_image_and_shrink() -> None:
    model, x = vit(), images()
    khot.reduce_tokens(model, 0.5, at=(0, 1, 3), fuse=True)(x)
    first, second, third = (set(kept[0].tolist()) for kept in model.kept_tokens.values())
    assert second <= first | {-1} and third <= second | {-1}
    assert first <= set(range(-1, 64)) and len(first) == 33


def test_keep_one_is_bit_identical_and_restoring_leaves_no_trace() -> None:
    model, x = vit(), images()
    before, expected, types = copy.deepcopy(model.state_dict()), model(x), [type(module) for module in model.modules()]
    khot.reduce_tokens(model, 1.0, at=(0, 2))
    assert torch.equal(model(x), expected)
    model.keep = 0.5
    assert not torch.equal(model(x), expected)
    assert isinstance(model, ViT) and model.state_dict().keys() == before.keys()
    assert khot.restore_tokens(model) is model
    assert torch.equal(model(x), expected)
    assert [type(module) for module in model.modules()] == types
    assert not any(module._forward_hooks for module in model.modules())
    assert not hasattr(model, "keep") and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_reducing_again_replaces_the_first_and_blocks_may_be_given_in_any_order() -> None:
    model, x = vit(), images()
    khot.reduce_tokens(model, 0.9, at=(1, 2))
    khot.reduce_tokens(model, 0.5, at=(2, 0))(x)
    assert {block: kept.shape[1] for block, kept in model.kept_tokens.items()} == {0: 32, 2: 16}


@pytest.mark.parametrize("score", ["cls", "learned"])
def test_deepcopy_and_pickle(score: str) -> None:
    model, x = khot.reduce_tokens(vit(), 0.5, at=(0, 2), score=score), images()
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert type(other) is type(model)
        torch.testing.assert_close(other(x), expected)
        other.keep = 0.25
        other(x)
        assert other.kept_tokens[0].shape[1] == 16 and model.kept_tokens[0].shape[1] == 32
        assert type(khot.restore_tokens(other)) is ViT


def test_attention_stays_fused_and_no_square_softmax_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rows, fused, softmax = [0], [], F.scaled_dot_product_attention, Tensor.softmax

    def count(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        return fused(*args, **kwargs)

    def watch(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(self.numel() // self.shape[-1])
        return softmax(self, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    monkeypatch.setattr(Tensor, "softmax", watch)
    khot.reduce_tokens(vit(), 0.5, at=(0, 2))(images())
    assert calls == [4] and rows == [8, 8]  # one row per image and head


class Operations(TorchDispatchMode):
    """How many operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        everything = func is torch.ops.aten.slice.Tensor and out.shape == args[0].shape  # what torch 2.6 calls for ":"
        self.count += not everything
        return out


def test_one_image_alone_is_that_image_and_costs_few_operations() -> None:
    model, x = vit(), images(3)
    with torch.no_grad():
        with Operations() as before:
            model(x[:1])
        together = khot.reduce_tokens(model, 0.5, at=(0, 2))(x)
        kept = {block: rows[:1] for block, rows in model.kept_tokens.items()}
        with Operations() as after:
            alone = model(x[:1])
    torch.testing.assert_close(alone, together[:1], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(rows, kept[block]) for block, rows in model.kept_tokens.items())
    assert after.count - before.count <= 2 * 18  # a block of its own makes 27; where a batch is one image, each costs what it costs


def test_a_refused_call_leaves_a_reduced_model_as_it_was() -> None:
    model = khot.reduce_tokens(vit(), 0.5, at=(0, 2))
    before = model(images())
    with pytest.raises(ValueError, match="at must name"):
        khot.reduce_tokens(model, 0.7, at=(9,))
    with pytest.raises(TypeError, match="score must be a name or a callable, got int"):
        khot.reduce_tokens(model, 0.7, at=(0,), score=3)  # pyright: ignore[reportArgumentType]
    assert model.keep == 0.5 and torch.equal(model(images()), before)
    khot.reduce_tokens(model, 0.25, at=(1,))  # patched anew, not twice
    assert list(model.kept_tokens) == [] and len(khot.restore_tokens(model).blocks[0]._forward_hooks) == 0


def test_autocast_and_checkpointing() -> None:
    model, x = khot.reduce_tokens(vit(), 0.5, at=(0, 2)), images()
    with torch.autocast("cpu", torch.bfloat16):
        assert bool(torch.isfinite(model(x)).all())
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    tokens = torch.cat([model.cls_token.expand(2, -1, -1), model.patch_embed(x)], 1) + model.pos_embed
    for block in model.blocks:
        tokens = torch.utils.checkpoint.checkpoint(block, tokens, use_reentrant=False)
    again = torch.autograd.grad(model.head(model.norm(tokens)[:, 0]).sum(), list(model.parameters()))
    for one, other in zip(expected, again, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("gradient", ["straight", "sample", "gumbel", "soft"])
def test_a_learned_score_gets_its_gradient_and_tokens_are_dropped(gradient: str) -> None:
    model, x = khot.reduce_tokens(vit(), 0.5, at=(0, 2), score="learned", gradient=gradient), images(4)
    model.train()
    seen: list[int] = []
    model.blocks[3].register_forward_hook(lambda _m, _i, out: seen.append(out.shape[1]))
    model(x).square().sum().backward()
    learned = [value for name, value in model.named_parameters() if "token_topk" in name]
    assert len(learned) == 12 and all(bool(value.grad.abs().sum() > 0) for value in learned if value.ndim == 2)
    assert seen == [65 if gradient == "soft" else 17]
    model.eval()(x)
    assert seen[1] == 17


def test_random_and_callable_scores() -> None:
    model, x = vit(), images()
    khot.reduce_tokens(model, 0.5, at=(0,), score="random")
    torch.manual_seed(0)
    one = (model(x), model.kept_tokens[0])[1]
    other = (model(x), model.kept_tokens[0])[1]
    assert not torch.equal(one, other)
    khot.reduce_tokens(model, 0.5, at=(0,), score=lambda tokens: -torch.arange(tokens.shape[1]).float().expand(len(tokens), -1))(x)
    assert model.kept_tokens[0][0].tolist() == list(range(32))


def test_sampled_tokens_have_exact_inclusion_probabilities_and_gumbel_has_not() -> None:
    scores, draws, chi = torch.linspace(-2, 2, 8), 10_000, {}
    expected = khot.sigmoid_topk(scores, 3, 1.0) * draws
    for gradient in ("sample", "gumbel"):
        layer = TokenTopK(score=lambda tokens: tokens[..., 0], num_prefix=0, gradient=gradient).train()
        tokens = scores[None, :, None].expand(draws, -1, 1).clone().requires_grad_()
        counts = torch.bincount(layer(tokens, 3).indices.flatten(), minlength=8)
        chi[gradient] = float(((counts - expected).square() / (expected * (1 - expected / draws))).sum())
    assert chi["sample"] < 26.1  # chi-square, 8 degrees, one in a thousand
    assert chi["gumbel"] > 100


def evit_count(num_tokens: int, keep: float, stage: int) -> int:
    """As EViT counts: rounded up, and the fused token of the stage before is a candidate too."""
    for _ in range(stage - 1):
        num_tokens = math.ceil(keep * num_tokens) + 1
    return math.ceil(keep * num_tokens)


def test_macs_are_the_published_ones_and_attention_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = ViT(dim=384, num_heads=6)  # DeiT-S
    assert abs(count_macs(model) / 1e9 - 4.6) < 0.05
    table = {0.9: 4.0, 0.8: 3.5, 0.7: 3.0, 0.6: 2.6, 0.5: 2.3}  # of EViT, rounded to .1 there
    ours = {keep: count_macs(khot.reduce_tokens(model, keep)) / 1e9 for keep in table}  # floor(N r^s): a token or two fewer a block
    assert all(abs(ours[keep] - table[keep]) < (0.08 if keep == 0.8 else 0.05) for keep in table)
    monkeypatch.setattr(reduced, "kept_count", evit_count)
    theirs = {keep: count_macs(khot.reduce_tokens(model, keep, fuse=True)) / 1e9 for keep in table}
    assert all(abs(theirs[keep] - table[keep]) < 0.05 for keep in table)
    with torch.device("meta"):
        shallow = ViT(dim=384, num_heads=6, depth=1)
        linear = count_macs(ViT(dim=384, num_heads=6, depth=0)) + 197 * (4 + 8) * 384**2
    assert count_macs(shallow) - linear == 2 * 197**2 * 384


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: khot.reduce_tokens(vit(), 0.0), r"keep must lie in \(0, 1\], got 0.0"),
        (lambda: khot.reduce_tokens(vit(), "half"), r"keep must lie in \(0, 1\], got 'half'"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=3), r"at must name different blocks from 0 to 3, got 3"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=(1,), num_prefix=-1), r"num_prefix must not be negative, got -1"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=(1,), num_prefix=65)(images()), r"num_prefix=65 leaves none of the 65 tokens"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=(1,), tau=0.0), r"tau must be positive"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=(1,), score=lambda x: x)(images()), r"must return shape \(2, 64\)"),
        (lambda: khot.reduce_tokens(vit(), 1.5), r"keep must lie in \(0, 1\]"),
        (lambda: setattr(khot.reduce_tokens(vit(), 0.5, at=(1,)), "keep", 2.0), r"keep must lie in \(0, 1\]"),
        (lambda: khot.reduce_tokens(vit(), 0.5), r"blocks from 0 to 3, got \(3, 6, 9\)"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=()), "blocks from 0 to 3"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=(1, 1)), "different blocks"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=(1,), score="clss"), "score must be one of cls"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=(1,), gradient="hard"), "gradient must be one of"),
        (lambda: khot.reduce_tokens(vit(), 0.5, at=(1,), num_prefix=0, score="cls"), "no class token"),
        (lambda: khot.reduce_tokens(nn.Linear(3, 3), 0.5), "Linear has no blocks that are known here; supported are khot.models.ViT"),
        (lambda: khot.reduce_tokens(create_model("topk", preset="tiny"), 0.5), "no blocks that are known"),
        (lambda: TokenTopK(score="learned"), "needs dim"),
        (lambda: TokenTopK()(torch.zeros(1, 5, 2), 5, torch.zeros(1, 4)), "between 1 and the 4 tokens"),
        (lambda: TokenTopK()(torch.zeros(1, 5, 2), 2), r"needs attention of shape \(1, 4\), got none"),
    ],
)
def test_bad_input_says_what_must_hold(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_a_refused_call_leaves_the_model_as_it_was() -> None:
    model, x = vit(), images()
    expected = model(x)
    for bad in ({"at": (9,)}, {"score": "nothing", "at": (1,)}, {"keep": 0.0}):
        with pytest.raises(ValueError):
            khot.reduce_tokens(model, **bad)
        assert type(model) is ViT and torch.equal(model(x), expected)
