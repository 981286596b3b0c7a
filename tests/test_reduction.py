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

import khot
from khot.models import ViT, count_macs, create_model
from khot.nn import TokenTopK

SMALL: dict[str, Any] = {"image_size": 32, "patch_size": 4, "in_channels": 3, "num_classes": 5, "dim": 32, "depth": 4, "num_heads": 4}


def vit(**changes: Any) -> ViT:
    return ViT(**SMALL | changes).eval()


def images(batch: int = 2, size: int = 32) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


LIBRARIES: list[Any] = []


def with_torchvision(name: str) -> Any:
    """``name``, which imports torchvision if it is there; one that was built for another torch lacks two operators."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        LIBRARIES.append(torch.library.Library("torchvision", "DEF"))  # it lives as long as this list
        for operator in ("nms", "qnms"):
            LIBRARIES[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip(name)


def eager_attention(attn: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and the whole N x N softmax of timm's and our attention."""
    batch, n, _ = x.shape
    q, k, v = attn.qkv(x).reshape(batch, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    q, k = (getattr(attn, f"{name}_norm", nn.Identity())(part) for name, part in (("q", q), ("k", k)))
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return attn.proj((weights @ v).transpose(1, 2).reshape(batch, n, -1)), weights


def slow_blocks(blocks: Any, x: Tensor, keep: float, at: tuple[int, ...], prefix: int, score: str, fuse: bool) -> Tensor:
    """Haurum's Top-K and EViT as published, one block and one image after the other."""
    total = x.shape[1] - prefix
    for i, block in enumerate(blocks):
        before = x
        out, weights = eager_attention(block.attn, block.norm1(x))
        x = x + getattr(block, "ls1", nn.Identity())(out)
        if i in at:
            count = math.floor(total * keep ** (sorted(at).index(i) + 1) + 1e-9)
            row = (weights[:, :, 0].mean(1) if score == "cls" else mean_query_row(block, before))[:, prefix:]
            x = torch.stack([slow_reduce(tokens, scores, count, prefix, fuse) for tokens, scores in zip(x, row, strict=True)])
        x = x + getattr(block, "ls2", nn.Identity())(block.mlp(block.norm2(x)))
    return x


def mean_query_row(block: Any, x: Tensor) -> Tensor:
    attn, batch, n = block.attn, len(x), x.shape[1]
    q, k, _ = attn.qkv(block.norm1(x)).reshape(batch, n, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    return (q.mean(2, keepdim=True) @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1).mean(1)[:, 0]


def slow_reduce(tokens: Tensor, scores: Tensor, count: int, prefix: int, fuse: bool) -> Tensor:
    order = sorted(range(len(scores)), key=lambda i: -float(scores[i].detach()))
    kept = [tokens[:prefix], tokens[prefix:][order[:count]]]
    if fuse:
        kept.append(sum(scores[i] * tokens[prefix + i] for i in order[count:])[None])
    return torch.cat(kept)


def slow_vit(model: ViT, x: Tensor, **settings: Any) -> Tensor:
    tokens = torch.cat([model.cls_token.expand(len(x), -1, -1), model.patch_embed(x)], 1) + model.pos_embed
    tokens = model.norm(slow_blocks(model.blocks, tokens, prefix=1, **settings))
    return model.head(tokens[:, 0] if model.pool == "cls" else tokens[:, 1:].mean(1))


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
        rows.append(self.shape[-2])
        return softmax(self, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    monkeypatch.setattr(Tensor, "softmax", watch)
    khot.reduce_tokens(vit(), 0.5, at=(0, 2))(images())
    assert calls == [4] and rows == [1, 1]


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


def test_macs_are_the_published_ones_and_attention_is_counted() -> None:
    with torch.device("meta"):
        model = ViT(dim=384, num_heads=6)  # DeiT-S
    assert abs(count_macs(model) / 1e9 - 4.6) < 0.05
    # The table of EViT, rounded to .1 there. At .8 it keeps one or two tokens more a block than floor(N r^s), hence the wider margin.
    for keep, billions, margin in ((0.9, 4.0, 0.05), (0.8, 3.5, 0.08), (0.7, 3.0, 0.05), (0.6, 2.6, 0.05), (0.5, 2.3, 0.05)):
        khot.reduce_tokens(model, keep)
        assert abs(count_macs(model) / 1e9 - billions) < margin, keep
    with torch.device("meta"):
        shallow = ViT(dim=384, num_heads=6, depth=1)
        linear = count_macs(ViT(dim=384, num_heads=6, depth=0)) + 197 * (4 + 8) * 384**2
    assert count_macs(shallow) - linear == 2 * 197**2 * 384


TIMM = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {"init_values": 0.3},
    "vit_small_patch14_reg4_dinov2": {"patch_size": 16},
    "vit_base_patch32_clip_224": {"patch_size": 16},
    "vit_tiny_patch16_224 avg": {"global_pool": "avg"},
    "vit_tiny_patch16_224 norm": {"qk_norm": True},
    "vit_base_patch16_siglip_224": {},
}


@pytest.mark.parametrize("name", TIMM)
def test_timm_against_the_slow_reference(name: str) -> None:
    timm = with_torchvision("timm")
    settings = {"img_size": 96, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 5} | TIMM[name]
    model = timm.create_model(name.split()[0], pretrained=False, **settings).eval()
    for value in model.parameters():
        nn.init.normal_(value, std=0.2)
    x, prefix = images(size=96), model.num_prefix_tokens
    score = "cls" if prefix else "received"
    tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    slow = model.forward_head(model.norm(slow_blocks(model.blocks, tokens, 0.6, (0, 1), prefix, score, False)))
    whole = model(x)
    khot.reduce_tokens(model, 0.6, at=(0, 1))
    torch.testing.assert_close(model(x), slow, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(slow, whole, atol=1e-3)
    assert torch.equal(khot.restore_tokens(model)(x), whole)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "vit_small_patch16_dinov3", "hiera_tiny_224"])
def test_timm_models_that_cannot_be_reduced_are_refused(name: str) -> None:
    timm = with_torchvision("timm")
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False)
    with pytest.raises(ValueError, match=r"windows|rotary|no blocks that are known"):
        khot.reduce_tokens(model, 0.5)


def hf_model(name: str) -> nn.Module:
    transformers = with_torchvision("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    kinds = {
        "vit": (transformers.ViTModel, transformers.ViTConfig),
        "deit": (transformers.DeiTModel, transformers.DeiTConfig),
        "dinov2": (transformers.Dinov2Model, transformers.Dinov2Config),
        "registers": (transformers.Dinov2WithRegistersModel, transformers.Dinov2WithRegistersConfig),
        "clip": (transformers.CLIPVisionModel, transformers.CLIPVisionConfig),
    }
    model, config = kinds[name]
    made = model(config(**sizes, image_size=32, patch_size=4)).eval()
    for value in made.parameters():
        nn.init.normal_(value, std=0.2)  # DeiT starts with a class token of zeros, which looks at every token alike
    return made


def hf_reference(model: nn.Module, layers: Any, x: Tensor, keep: float, at: tuple[int, ...], prefix: int) -> Tensor:
    """Whole layers with eager attention; the output-hook form: rows are gathered after the MLP, by attention that transformers returns."""
    total = x.shape[1] - prefix
    for i, layer in enumerate(layers):
        seen: list[Tensor] = []
        attention = getattr(layer, "attention", None) or layer.self_attn
        handle = attention.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out[1]))
        out = layer(x, None)
        x = out[0] if isinstance(out, tuple) else out
        handle.remove()
        if i in at:
            count = math.floor(total * keep ** (at.index(i) + 1) + 1e-9)
            kept = seen[0][:, :, 0, prefix:].mean(1).topk(count).indices + prefix
            x = torch.stack([torch.cat([tokens[:prefix], tokens[rows]]) for tokens, rows in zip(x, kept, strict=True)])
    return x


@pytest.mark.parametrize(("name", "prefix"), [("vit", 1), ("deit", 2), ("dinov2", 1), ("registers", 5), ("clip", 1)])
def test_transformers_against_eager_attention(name: str, prefix: int) -> None:
    model, x = hf_model(name), images()
    layers = khot.models.encoders.find_blocks(model)[0]
    inputs: list[Tensor] = []
    handle = layers[0].register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    before = model(x).last_hidden_state
    handle.remove()
    model.set_attn_implementation("eager")
    slow = hf_reference(model, layers, inputs[0], 0.6, (0, 1), prefix)
    model.set_attn_implementation("sdpa")
    outputs: list[Tensor] = []
    khot.reduce_tokens(model, 0.6, at=(0, 1))
    handle = layers[-1].register_forward_hook(lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    model(x)
    torch.testing.assert_close(outputs[0], slow, rtol=1e-4, atol=1e-5)
    handle.remove()
    torch.testing.assert_close(khot.restore_tokens(model)(x).last_hidden_state, before, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_bert_with_padding_keeps_words_and_ignores_padding(implementation: str) -> None:
    transformers = with_torchvision("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, initializer_range=0.3
    )
    config._attn_implementation = implementation
    model = transformers.BertModel(config).eval()
    khot.reduce_tokens(model, 0.6, at=(0, 1))
    words = torch.randint(1, 50, (3, 21))
    lengths = [21, 16, 15]  # floor(20 * .6) = 12 words besides [CLS] are kept
    mask = torch.stack([torch.arange(21) < length for length in lengths]).long()
    together = model(input_ids=words, attention_mask=mask).last_hidden_state[:, 0]
    for row, length in zip(model.kept_tokens[0], lengths, strict=True):
        assert int(row.max()) < length - 1
    other = model(input_ids=torch.where(mask.bool(), words, 7), attention_mask=mask).last_hidden_state[:, 0]
    torch.testing.assert_close(together, other, rtol=1e-4, atol=1e-5)  # what the padding says does not matter
    alone = model(input_ids=words[:1]).last_hidden_state[:, 0]
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-5)
    short = model(input_ids=words[2:, :10], attention_mask=mask[2:, :10])  # fewer words than are kept elsewhere
    assert bool(torch.isfinite(short.last_hidden_state).all())


@pytest.mark.slow
def test_compile_export_and_onnx(tmp_path: Any) -> None:
    model, x = khot.reduce_tokens(vit(), 0.5, at=(0, 2)), images(3)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected, rtol=1e-4, atol=1e-5)
    program = torch.export.export(model, (images(2),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    torch.testing.assert_close(program.module()(x), expected, rtol=1e-4, atol=1e-5)
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.onnx.export(program, (images(2),), str(tmp_path / "model.onnx"), dynamo=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: khot.reduce_tokens(vit(), 0.0), r"keep must lie in \(0, 1\], got 0.0"),
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
