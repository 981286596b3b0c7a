"""Bounds are sound: no sampled, corner or attacking perturbation leaves them; linear forms are never looser than intervals."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import khot
from khot import bounds
from khot.bounds import Affine, Box
from khot.models import ViT
from tests.test_reduction import with_torchvision

WIDE = torch.float64
W, V = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 3, torch.randn(8, generator=torch.Generator().manual_seed(2))
KERNEL = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(3))


def line(t: Tensor) -> Tensor:
    return t @ W.to(WIDE).mT + V.to(WIDE)


def gelu(t: Tensor) -> Tensor:
    """With the digits of its lower tail, which ``F.gelu`` loses."""
    return 0.5 * t * torch.erfc(-t * 0.5**0.5)


def of_line(op: Callable[..., object]) -> Callable[..., object]:
    return lambda x: op(bounds.linear(x, W, V))


# name: (on bounds, on tensors, shape of the input)
OPERATIONS = {
    "linear": (lambda x: bounds.linear(x, W, V), line, (5, 8)),
    "relu": (of_line(bounds.relu), lambda t: line(t).relu(), (5, 8)),
    "gelu": (of_line(bounds.gelu), lambda t: gelu(line(t)), (5, 8)),
    "wide gelu": (lambda x: bounds.gelu(x.scale(torch.full((1, 1, 1), 5.0, dtype=WIDE))), lambda t: gelu(5 * t), (5, 8)),
    "exp": (of_line(bounds.exp), lambda t: line(t).exp(), (5, 8)),
    "reciprocal": (lambda x: bounds.reciprocal(bounds.exp(x)), lambda t: (-t).exp(), (5, 8)),
    "rsqrt": (lambda x: bounds.rsqrt(bounds.exp(x)), lambda t: (-t / 2).exp(), (5, 8)),
    "square": (lambda x: bounds.linear(x, W, V).square(), lambda t: line(t).square(), (5, 8)),
    "product": (lambda x: x.bilinear(bounds.linear(x, W, V), torch.mul), lambda t: t * line(t), (5, 8)),
    "matrix product": (lambda x: bounds.matmul(x, x.linear(lambda t: t.mT)), lambda t: t @ t.mT, (5, 8)),
    "softmax": (of_line(bounds.softmax), lambda t: line(t).softmax(-1), (5, 8)),
    "layer norm": (lambda x: bounds.layer_norm(x, V, V, 1e-5), lambda t: F.layer_norm(t, (8,), V.to(WIDE), V.to(WIDE), 1e-5), (5, 8)),
    "attention": (
        lambda x: bounds.attend(bounds.softmax(bounds.matmul(x, x.linear(lambda t: t.mT))), x),
        lambda t: (t @ t.mT).softmax(-1) @ t,
        (5, 8),
    ),
    "patches": (lambda x: bounds.patches(x, KERNEL, None, 4), lambda t: F.conv2d(t, KERNEL.to(WIDE), stride=4).flatten(2).mT, (2, 8, 12)),
    "concat": (lambda x: bounds.cat([x, bounds.linear(x, W, V)], -2), lambda t: torch.cat([t, line(t)], -2), (5, 8)),
    "gather": (lambda x: bounds.gather(x, torch.tensor([[3, 0]])), lambda t: t[:, [3, 0]], (5, 8)),
    "sum": (lambda x: x.linear(lambda t: t.sum(-1), terms=8), lambda t: t.sum(-1), (5, 8)),
    "kth best": (lambda x: bounds.kth_best(x, x.linear(lambda t: t[..., 0]), 3), lambda t: best(t, t[..., 0], 3), (6, 8)),
}


def best(t: Tensor, scores: Tensor, k: int) -> Tensor:
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return t.gather(1, order.unsqueeze(-1).expand(-1, -1, t.shape[-1]))


def perturbed(x: Tensor, eps: float, count: int) -> Tensor:
    """Half corners of the box, half points inside it."""
    corners = torch.randint(0, 2, (count // 2, *x.shape[1:])).to(WIDE) * 2 - 1
    inside = torch.rand(count - count // 2, *x.shape[1:], dtype=WIDE) * 2 - 1
    return x.to(WIDE) + eps * torch.cat([corners, inside])


def violations(values: Tensor, bound: Box | Affine) -> int:
    return int(((values < bound.lower) | (values > bound.upper)).sum())


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


@pytest.fixture(scope="module")
def model() -> ViT:
    torch.manual_seed(0)
    model = ViT(image_size=12, patch_size=4, in_channels=1, num_classes=4, dim=16, depth=3, num_heads=2).eval()
    with torch.no_grad():  # at its initial size the class token is so small that layer norm magnifies everything
        for parameter in (model.cls_token, model.pos_embed):
            parameter.normal_()
    return model


def pruned(model: ViT, x: Tensor, keep: dict[int, int]) -> Tensor:
    """The network with hard token reduction, step by step."""
    t = torch.cat([model.cls_token.expand(len(x), -1, -1), model.patch_embed(x)], 1) + model.pos_embed
    for i, block in enumerate(model.blocks):
        n, heads = t.shape[1], block.attn.num_heads
        q, k, v = block.attn.qkv(block.norm1(t)).view(len(x), n, 3, heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        t = t + block.attn.proj((weights @ v).transpose(1, 2).flatten(2))
        if i in keep:
            t = torch.cat([t[:, :1], best(t[:, 1:], weights[:, :, 0, 1:].mean(1), keep[i])], 1)
        t = t + block.mlp(block.norm2(t))
    return model.head(model.norm(t)[:, 0])


def attacked(model: ViT, x: Tensor, eps: float, keep: dict[int, int], steps: int = 5) -> Tensor:
    """Projected gradient ascent on the margin of every class."""
    found = []
    for target in range(4):
        moved = x.clone()
        for _ in range(steps):
            moved.requires_grad_()
            pruned(model, moved, keep)[:, target].sum().backward()
            moved = (x + (moved + eps / 4 * moved.grad.sign() - x).clamp(-eps, eps)).detach()  # type: ignore[union-attr]
        found.append(moved)
    return torch.cat(found)


@pytest.mark.parametrize("domain", ["box", "affine"])
@pytest.mark.parametrize("keep", [{}, {0: 5}, {0: 6, 1: 3}], ids=str)
def test_certificates_hold_under_attack(model: ViT, domain: str, keep: dict[int, int]) -> None:
    wide, x = model.double(), torch.rand(2, 1, 12, 12, dtype=WIDE)
    for eps in (0.004,):
        found = bounds.certify(wide, x, eps, domain=domain, keep=keep)
        for image in range(2):
            one = x[image : image + 1]
            points = torch.cat([perturbed(one, eps, 200), attacked(wide, one, eps, keep)])
            logits = pruned(wide, points, keep)
            assert violations(logits, Box(found.lower[image], found.upper[image])) == 0
            if found.certain[image]:
                assert bool((logits.argmax(-1) == found.label[image]).all())


def test_linear_forms_decide_more_tokens_than_intervals(model: ViT) -> None:
    x = torch.rand(4, 1, 12, 12, dtype=WIDE)
    share = {
        domain: bounds.certify(model.double(), x, 0.01, domain=domain, keep={0: 4}).decided[0].share.mean() for domain in ("box", "affine")
    }
    assert share["affine"] > share["box"]


@pytest.mark.parametrize("domain", ["box", "affine"])
def test_a_model_that_was_reduced_in_place_is_read(model: ViT, domain: str) -> None:
    eps, x = 0.002, torch.rand(1, 1, 12, 12, dtype=WIDE)
    reduced = khot.reduce_tokens(copy.deepcopy(model).double(), keep=0.6, at=(0, 2))
    found = bounds.certify(reduced, x, eps, domain=domain)
    points = perturbed(x, eps, 100)
    with torch.no_grad():
        logits = reduced(points)
    assert violations(logits, Box(found.lower[0], found.upper[0])) == 0
    assert set(found.decided) == {0, 2}
    for block, decided in found.decided.items():
        kept = torch.zeros(100, 9, dtype=torch.bool).scatter(1, reduced.kept_tokens[block], True)
        assert bool((kept | ~decided.kept).all()) and not bool((kept & decided.dropped).any())
        there = decided.kept | decided.dropped | decided.undecided
        assert bool((kept.any(0) <= there).all()) and int(kept[0].sum()) == (5 if block == 0 else 3)


def test_reductions_that_are_not_known_are_refused(model: ViT) -> None:
    x = torch.zeros(1, 1, 12, 12)
    for options in ({"fuse": True}, {"score": "learned"}, {"score": "received"}):
        with pytest.raises(TypeError, match="score='cls', fuse=False"):
            bounds.certify(khot.reduce_tokens(copy.deepcopy(model).float(), 0.5, at=(0,), **options), x, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        bounds.certify(copy.deepcopy(model).train(), x, 0.1)
    with pytest.raises(ValueError, match="keep must map blocks 0 to 2"):
        bounds.certify(model, x, 0.1, keep={3: 2})


def contained(model: torch.nn.Module, x: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
    found = bounds.certify(model, x, 0.002)
    with torch.no_grad():
        values = logits(perturbed(x, 0.002, 50))
    assert violations(values, Box(found.lower[0], found.upper[0])) == 0
    assert (found.upper - found.lower).max() < 20


def test_timm_models_of_the_plain_kind() -> None:
    timm = with_torchvision("timm")
    make = functools.partial(timm.create_model, "vit_tiny_patch16_224", img_size=12, patch_size=4, in_chans=1, num_classes=3, depth=2)
    plain = make(embed_dim=16, num_heads=2).double().eval()
    torch.nn.init.normal_(plain.pos_embed)
    x = torch.rand(1, 1, 12, 12, dtype=WIDE)
    contained(plain, x, plain)
    reduced = khot.reduce_tokens(plain, 0.5, at=(0,))
    contained(reduced, x, reduced)
    for options in ({"reg_tokens": 2}, {"init_values": 1.0}, {"global_pool": "avg"}, {"qk_norm": True}):
        with pytest.raises(TypeError, match="certify knows plain vision transformers"):
            bounds.certify(make(embed_dim=16, num_heads=2, **options).eval(), x.float(), 0.1)


def test_transformers_models_of_the_plain_kind() -> None:
    transformers = with_torchvision("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=12, patch_size=4, num_channels=1
    )
    model = transformers.ViTForImageClassification(config).double().eval()
    torch.nn.init.normal_(model.vit.embeddings.position_embeddings)
    x = torch.rand(1, 1, 12, 12, dtype=WIDE)
    contained(model, x, lambda t: model(t).logits)
    reduced = khot.reduce_tokens(model, 0.5, at=(0,))
    contained(reduced, x, lambda t: reduced(t).logits)


def test_bad_input_is_refused_in_words(model: ViT) -> None:
    x = torch.zeros(1, 1, 12, 12)
    with pytest.raises(ValueError, match="eps must be at least 0, got -1"):
        bounds.certify(model, x, -1.0)
    with pytest.raises(ValueError, match="domain must be 'affine' or 'box', got 'zonotope'"):
        bounds.certify(model, x, 0.1, domain="zonotope")
    with pytest.raises(ValueError, match="x must be finite"):
        bounds.certify(model, x * torch.nan, 0.1)
    with pytest.raises(ValueError, match="9 patches of 4 x 4"):
        bounds.certify(model, torch.zeros(1, 1, 16, 16), 0.1)
    with pytest.raises(TypeError, match="certify knows plain vision transformers"):
        bounds.certify(torch.nn.Linear(3, 3), x, 0.1)
    with pytest.raises(TypeError, match="not one linear map"):
        bounds.certify(ViT(image_size=16, patch_size=4, in_channels=1, num_classes=4, dim=16, depth=1, num_heads=2, stem="conv"), x, 0.1)
    box = Box.around(torch.zeros(1, 4), 0.0)
    with pytest.raises(ValueError, match=r"x must be \(B, N, d\) for scores \(B, N\)"):
        bounds.topk(box, box, 2)
    with pytest.raises(ValueError, match="k must be between 0 and n=4, got 5"):
        bounds.topk(box.linear(lambda t: t.unsqueeze(-1)), box, 5)
    with pytest.raises(ValueError, match="positive lower bound"):
        bounds.reciprocal(box)


@pytest.mark.slow
def test_a_hundred_thousand_perturbations_leave_no_bound(model: ViT) -> None:
    """Corners and points inside for every operation, and attacks beside them for networks; ties among the scores included."""
    wide, count, found = model.double(), 0, 0
    for name, (on_bounds, on_tensors, shape) in OPERATIONS.items():
        for eps in (1e-4, 0.02, 0.3):
            x = torch.randn(1, *shape)
            x = x.round() if name == "kth best" else x
            values = on_tensors(perturbed(x, eps, 1800))
            count += len(values)
            found += sum(violations(values, on_bounds(domain.around(x, eps))) for domain in (Box, Affine))
    for keep in ({}, {0: 5}, {0: 6, 1: 3}):
        x = torch.rand(1, 1, 12, 12, dtype=WIDE)
        for eps in (0.0005, 0.004):
            points = torch.cat([perturbed(x, eps, 1000), attacked(wide, x, eps, keep, 10)])
            with torch.no_grad():
                logits = pruned(wide, points, keep)
            count += len(points)
            for domain in ("box", "affine"):
                bound = bounds.certify(wide, x, eps, domain=domain, keep=keep)
                found += violations(logits, Box(bound.lower[0], bound.upper[0]))
    assert count >= 100_000
    assert found == 0, f"{found} of the numbers at {count} perturbations are outside"
