"""The sparse autoencoder against its definition, and its files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import khot
from khot.nn import LearnedK, SparseAutoencoder, anneal


def make(**options: Any) -> SparseAutoencoder:
    torch.manual_seed(0)
    return SparseAutoencoder(**{"d_in": 12, "d_sae": 40, "k": 4} | options)


def data(n: int = 512) -> torch.Tensor:
    """Sums of three of 30 directions, off centre."""
    generator = torch.Generator().manual_seed(1)
    atoms = torch.nn.functional.normalize(torch.randn(30, 12, generator=generator), dim=-1)
    codes = khot.topk_mask(torch.rand(n, 30, generator=generator), 3) * (0.5 + torch.rand(n, 30, generator=generator))
    return codes @ atoms + 2.0


def train(sae: SparseAutoencoder, steps: int = 200) -> float:
    x = data()
    sae.center(x)
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-2)
    for step in range(steps):
        anneal(sae, step / steps)
        loss = sae.loss(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    anneal(sae, 1.0)
    sae.eval().loss(x)
    return float(sae.stats["fvu"])


@pytest.mark.parametrize("training", [True, False])
def test_is_the_function_that_sae_lens_defines(training: bool) -> None:
    sae, x = make().train(training), data(20)
    best = ((x - sae.b_dec) @ sae.W_enc + sae.b_enc).topk(4)
    latents = torch.zeros(20, 40).scatter(-1, best.indices, best.values.relu())
    decoder = sae.W_dec / sae.W_dec.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(sae(x).latents, latents)
    torch.testing.assert_close(sae(x).recon, latents @ decoder + sae.b_dec)
    torch.testing.assert_close(sae.decode(sae.encode(x)), sae(x).recon)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "sigmoid"},
        {"method": "sigmoid", "design": "systematic"},
        {"select": "batch_topk"},
        {"select": "batch_topk", "method": "euclidean"},
        {"passes": 2, "start": 4.0},
        {"signed": True},
        {"aux": True, "dead_after": 2000},
        {"k": LearnedK(12, mean=4)},
    ],
    ids=str,
)
def test_learns_with_every_selection_and_keeps_its_budget(options: dict) -> None:
    sae = make(**options)
    untrained = make(**options)
    untrained.center(data())
    untrained.eval().loss(data())
    fvu = train(sae)
    assert fvu < 0.6 * float(untrained.stats["fvu"])
    assert float(sae.stats["l0"]) <= 4 * 1.25 and 0 <= float(sae.stats["dead"]) < 0.5


def test_the_decoders_gradient_is_perpendicular_to_its_rows() -> None:
    sae = make().double()
    with torch.no_grad():
        sae.W_dec.mul_(3.0)
    sae.loss(data(50).double()).backward()
    along = (sae.W_dec.grad * sae.W_dec).sum(-1)
    assert sae.W_dec.grad.abs().max() > 0 and along.abs().max() < 1e-12


def test_the_relaxed_gradient_reaches_latents_that_were_not_selected() -> None:
    x = data(8)
    plain, soft = make(), make(method="sigmoid", tau=2.0)
    reached = []
    for sae in (plain, soft):
        sae.loss(x).backward()
        reached.append(int((sae.b_enc.grad != 0).sum()))
    assert reached[0] == int((plain.encode(x) != 0).any(0).sum()) < reached[1]
    torch.testing.assert_close(plain(x), soft(x))  # the values are the same


def test_k_falls_on_stairs_and_evaluation_uses_k() -> None:
    sae, x = make(start=4.0, until=0.5), data(30)
    counts = []
    for step in range(101):
        anneal(sae, step / 100)
        counts.append(sae.count)
    assert counts[0] == 16 and counts[-1] == counts[50] == 4 and counts == sorted(counts, reverse=True) and len(set(counts)) <= 7
    anneal(sae, 0.0)
    assert sae.eval()(x).latents.count_nonzero(-1).max() <= 4


def test_batch_topk_counts_over_the_batch_and_has_a_threshold_in_evaluation() -> None:
    sae, x = make(select="batch_topk"), data(64)
    latents = sae(x).latents
    assert latents.count_nonzero() == 64 * 4 and latents.count_nonzero(-1).unique().numel() > 1
    assert sae.threshold == latents[latents > 0].min()
    alone = sae.eval()(x[:1]).latents  # a token does not depend on its batch any more
    torch.testing.assert_close(alone, sae(x).latents[:1])


@pytest.mark.parametrize("passes", [2, 3])
def test_every_pass_of_batch_topk_has_its_own_threshold(passes: int) -> None:
    sae, x = make(select="batch_topk", passes=passes), data(256)
    with torch.no_grad():  # values of the passes lie far apart
        sae.b_refine += 5 * torch.arange(1.0, passes).unsqueeze(-1)
    latents = sae(x).latents
    torch.testing.assert_close(sae.eval()(x).latents.count_nonzero() / 256, torch.tensor(4.0), atol=0.05, rtol=0)
    assert sae.threshold.shape == (passes,) and sae.threshold[-1] == latents[latents > 0].min()


def test_a_threshold_is_kept_for_the_final_k_only() -> None:
    sae, x = make(select="batch_topk", start=4.0), data(64)
    sae.loss(x)
    assert sae.count == 16 and sae.threshold.isnan() and sae.eval()(x).latents.count_nonzero() == 64 * 4
    anneal(sae.train(), 1.0)
    sae.loss(x)
    assert sae.threshold > 0 and sae.eval()(x).latents.count_nonzero() <= 64 * 4


def test_learned_k_differs_between_tokens() -> None:
    sae = make(k=LearnedK(12, mean=4))
    with torch.no_grad():
        sae.k.weight.normal_()
    counts = sae.eval()(data(100)).latents.count_nonzero(-1)
    assert counts.unique().numel() > 2
    sae.train().loss(data(100)).backward()
    assert sae.k.weight.grad.abs().sum() > 0


def test_signed_latents_are_the_largest_by_magnitude() -> None:
    sae, x = make(signed=True), data(30) - 2.0
    latents = sae(x).latents
    pre = x @ sae.W_enc
    assert (latents < 0).any() and (latents.count_nonzero(-1) == 4).all()
    torch.testing.assert_close(latents, pre * khot.topk_mask(pre.abs(), 4))


def test_center_is_the_geometric_median() -> None:
    sae = make(d_in=1, k=1)
    sae.center(torch.tensor([[0.0], [1.0], [2.0], [3.0], [1e6]]))
    assert sae.b_dec.item() == pytest.approx(2.0, abs=0.05)


def test_dead_latents_are_counted_and_revived_by_the_auxiliary_loss() -> None:
    sae = make(aux=True, dead_after=100)
    with torch.no_grad():
        sae.b_enc[:10] = -100.0
    x = data(64)
    sae.loss(x)
    sae.loss(x).backward()
    assert sae.stats["dead"] >= 0.25
    plain = make()
    plain.loss(x).backward()
    with torch.no_grad():
        sae.b_enc[:10] = -0.5
    sae.zero_grad()
    sae.silent[:10] = 1000
    sae.loss(x).backward()
    assert sae.W_enc.grad[:, :10].abs().sum() > 0


@pytest.mark.parametrize("options", [{}, {"select": "batch_topk"}], ids=str)
def test_files_in_the_layout_of_sae_lens(options: dict, tmp_path: Path) -> None:
    sae, x = make(**options), data(30)
    train(sae, 20)
    sae.save(tmp_path / "a")
    config, tensors = json.loads((tmp_path / "a/cfg.json").read_text()), load_file(tmp_path / "a/sae_weights.safetensors")
    hidden = (x - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_enc"]
    if config["architecture"] == "topk":
        best = hidden.topk(config["k"])
        code = torch.zeros_like(hidden).scatter(-1, best.indices, best.values.relu())
    else:
        code = hidden.relu() * (hidden > tensors["threshold"])
    torch.testing.assert_close(code @ tensors["W_dec"] + tensors["b_dec"], sae(x).recon, rtol=1e-6, atol=1e-6)
    again = SparseAutoencoder.load(tmp_path / "a").eval()
    torch.testing.assert_close(again(x).recon, sae(x).recon, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"passes": 2}, {"signed": True}, {"k": LearnedK(12, mean=4)}, {"method": "sigmoid"}], ids=str)
def test_files_of_our_own(options: dict, tmp_path: Path) -> None:
    sae, x = make(**options).eval(), data(30)
    sae.save(tmp_path, format="khot")
    again = SparseAutoencoder.load(tmp_path).eval()
    torch.testing.assert_close(again(x), sae(x))
    if "method" not in options:
        with pytest.raises(ValueError, match="format='khot'"):
            sae.save(tmp_path)


def test_files_that_do_not_fit_say_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cfg\.json is missing"):
        SparseAutoencoder.load(tmp_path)
    make().save(tmp_path)
    weights, config = tmp_path / "sae_weights.safetensors", tmp_path / "cfg.json"
    tensors, text = load_file(weights), config.read_text()
    save_file({name: tensor for name, tensor in tensors.items() if name != "b_enc"}, weights)
    with pytest.raises(ValueError, match="b_enc is missing"):
        SparseAutoencoder.load(tmp_path)
    save_file(tensors | {"W_dec": 2 * tensors["W_dec"]}, weights)
    with pytest.raises(ValueError, match="have norms from 2 to 2"):
        SparseAutoencoder.load(tmp_path)
    for old, new, message in (("topk", "gated", "architecture 'gated'"), ('"none"', '"layer_norm"', "normalize_activations")):
        config.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            SparseAutoencoder.load(tmp_path)
    with pytest.raises(ValueError, match="no threshold"):
        make(select="batch_topk").save(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 41}, "between 1 and d_sae=40"),
        ({"k": 0}, "between 1"),
        ({"select": "all"}, "select must be"),
        ({"design": "systematic"}, "name one"),
        ({"passes": 0}, "passes must be a whole number from 1 on, got 0"),
        ({"k": LearnedK(11, mean=4)}, "dim=12"),
        ({"method": "sigmod"}, "did you mean"),
    ],
)
def test_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
