"""Certificates of whole networks: sound under attack, for ours and for those of timm and transformers."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import khot
from khot import bounds
from khot.bounds import Affine, Box
from khot.models import ViT
from tests.bounding import OPERATIONS, WIDE, best, perturbed, violations
from tests.slow_vision import with_torchvision


@pytest.fixture(scope="module")
def model() -> ViT:
    return network(3)


def network(depth: int, seed: int = 0) -> ViT:
    torch.manual_seed(seed)
    model = ViT(image_size=12, patch_size=4, in_channels=1, num_classes=4, dim=16, depth=depth, num_heads=2).eval()
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


def turning(model: ViT, eps: float, keep: int) -> tuple[Tensor, ...]:
    """Images so near to others for which the first block keeps other tokens that no certificate can decide which ones it keeps."""

    def weights(x: Tensor) -> Tensor:
        t = torch.cat([model.cls_token.expand(len(x), -1, -1), model.patch_embed(x)], 1) + model.pos_embed
        attn = model.blocks[0].attn
        q, k, _ = attn.qkv(model.blocks[0].norm1(t)).view(*t.shape[:2], 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)[:, :, 0, 1:].mean(1)

    x = torch.rand(256, 1, 12, 12, dtype=WIDE, generator=torch.Generator().manual_seed(7), requires_grad=True)
    best = weights(x)
    last, next_one = best.topk(keep + 1).values[:, -2:].unbind(-1)
    (grad,) = torch.autograd.grad((last - next_one).sum(), x)
    other = weights(x - eps * grad.sign())  # where the lead of the last token that is kept shrinks fastest
    turns = (khot.topk_mask(best, keep) != khot.topk_mask(other, keep)).any(-1)
    return x.detach()[turns].unsqueeze(1).unbind()


@pytest.mark.parametrize(("depth", "widest"), [(2, 1.0), (3, 2.0)])
def test_one_pass_contains_every_case_and_is_hardly_wider(depth: int, widest: float) -> None:
    """As wide as all cases together where the last block follows the selection; behind one more block, twice as wide for half of them."""
    eps, rounding, ratios = 0.02, 1e-10, []  # all bounds are rounded outward, by some 1e-13
    # Random networks differ between releases of torch, and a few of them keep the same tokens for all images.
    networks = [(wide, turning(wide, eps, 4)[:2]) for wide in (network(depth, seed).double() for seed in range(5))]
    for wide, x in ((wide, x) for wide, images in networks for x in images):
        found = bounds.certify(wide, x, eps, keep={0: 4})
        cases = list(bounds.certify_cases(wide, x, eps, keep={0: 4}))
        assert len(cases) >= int(found.decided[0].undecided.sum()) > 1
        lower, upper = torch.cat([case.lower for case in cases]).amin(0), torch.cat([case.upper for case in cases]).amax(0)
        assert bool((found.lower <= lower + rounding).all() and (found.upper >= upper - rounding).all())
        if len(cases) == int(found.decided[0].undecided.sum()):  # one token is left to choose, or one to leave out
            ratios.append(float(((found.upper - found.lower) / (upper - lower)).mean()))
    assert len(ratios) >= 4
    assert (max(ratios) if widest == 1 else statistics.median(ratios)) <= widest + 1e-6


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
    with pytest.raises(ValueError, match="one image at a time, got a batch of 2"):
        bounds.certify_cases(model, torch.zeros(2, 1, 12, 12), 0.1, keep={0: 4})
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


@pytest.mark.parametrize("eps", [1e3, 1e20, 1e30, 1e150, 1e300])
@pytest.mark.parametrize("domain", ["box", "affine"])
def test_nothing_is_decided_where_everything_may_move(model: ViT, domain: str, eps: float) -> None:
    """Linear forms beyond the integers and beyond float64: no token is certain, and the bounds hold."""
    wide, x = copy.deepcopy(model).double(), torch.rand(2, 1, 12, 12, dtype=WIDE)
    found = bounds.certify(wide, x, eps, domain=domain, keep={0: 4, 1: 2})
    assert bool(found.decided[0].undecided.all()) and not bool(found.certain.any())
    logits = pruned(wide, x[:1] + eps * (2 * torch.rand(100, 1, 12, 12, dtype=WIDE) - 1), {0: 4, 1: 2})
    assert violations(logits[logits.isfinite().all(-1)], Box(found.lower[0], found.upper[0])) == 0


def test_bad_input_is_refused_in_words(model: ViT) -> None:
    x = torch.zeros(1, 1, 12, 12)
    with pytest.raises(ValueError, match="eps must be finite and at least 0, got -1"):
        bounds.certify(model, x, -1.0)
    with pytest.raises(ValueError, match="eps must be finite and at least 0, got inf"):
        bounds.certify(model, x, torch.inf)
    with pytest.raises(ValueError, match="at least one image, got a batch of 0"):
        bounds.certify(model, x[:0], 0.1)
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
