"""Token reduction of models of timm and transformers, and what compilers and exporters make of it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import khot
from tests.slow_vision import images, slow_blocks, vit, with_torchvision

TIMM = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_patch16_224": {},
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


@pytest.mark.parametrize("name", ["timm", "vit", "clip"])
def test_attention_of_other_libraries_stays_fused_and_weights_untouched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "timm":
        sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4}
        model = with_torchvision("timm").create_model("vit_tiny_patch16_224", pretrained=False, **sizes).eval()
    else:
        model = hf_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    calls, fused = [], nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda q, *a, **k: calls.append(q.shape[-2]) or fused(q, *a, **k))
    khot.reduce_tokens(model, 0.5, at=(0, 1))(images())
    assert calls == [65, 33, 17]  # every block, on ever fewer tokens
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_windowed_models_of_transformers_are_refused() -> None:
    transformers = with_torchvision("transformers")
    model = transformers.SwinModel(
        transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=4)
    )
    with pytest.raises(ValueError, match="attends in windows"):
        khot.reduce_tokens(model, 0.5)


@pytest.mark.parametrize("score", ["cls", "received"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_bert_with_padding_keeps_words_and_ignores_padding(implementation: str, score: str) -> None:
    transformers = with_torchvision("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, initializer_range=0.3
    )
    config._attn_implementation = implementation
    model = transformers.BertModel(config).eval()
    khot.reduce_tokens(model, 0.6, at=(0, 1), score=score)
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
