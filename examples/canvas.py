"""Find a digit on a cluttered canvas: a scorer sees a small image, the classifier only the k patches that the scorer chose.

A handwritten digit lies somewhere on a canvas of 112 x 112 pixels among fragments of other digits. The scorer sees the canvas four times
smaller and gives each of the 49 patches a score; the classifier sees k = 4 patches in full resolution. A hard top-k gives the scorer no
gradient; a relaxed or a sampled one does. After Cordonnier et al. 2021, "Differentiable Patch Selection for Image Recognition".

    python examples/canvas.py --data_dir FOLDER_OF_MNIST --seeds 0 1 2 --records canvas.jsonl --out canvas.png

Runs that are in the records already are not run again. Settings are chosen with ``--part validation``: digits that are never trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import khot
from khot.train.records import append, circumstances, read
from khot.train.sources import Memory, load

GRID, PATCH, SIZE = 7, 16, 112  # patches in a row, pixels of a patch, pixels of a canvas
METHODS = ("relaxed", "perturbed", "straight", "sample", "gumbel", "hard", "random")
MATRICES = {"relaxed": "softsort", "perturbed": "perturbed"}  # perturbed: the method of the paper
SAMPLES = 4  # sets of patches that are drawn for one canvas
HELD_OUT = 5000  # training digits of the canvases that settings are chosen on
FOUND_BY = ("part", "k", "steps", "batch", "test", "lr", "tau")  # with method and seed: what makes two runs the same


def make_canvases(source: Memory, n: int, generator: torch.Generator, pieces: int = 12, side: int = 8) -> tuple[Tensor, Tensor]:
    """``n`` canvases ``(n, 1, 112, 112)`` with ``pieces`` fragments of digits, and the classes of the digits, each on 2 x 2 patches."""
    picks = torch.randint(len(source.labels), (n,), generator=generator)
    digits, canvases = F.pad(source.images(picks, None), (2, 2, 2, 2)), torch.zeros(n, 1, SIZE, SIZE)  # digits of 32 x 32
    fragments = source.images(torch.randint(len(source.labels), (n * pieces,), generator=generator), None)[:, :, 10:18, 10:18]
    for i, (top, left) in enumerate(torch.randint(SIZE - side, (n * pieces, 2), generator=generator).tolist()):
        canvases[i // pieces, :, top : top + side, left : left + side] = fragments[i]
    places = torch.randint(GRID - 1, (n, 2), generator=generator) * PATCH
    for canvas, digit, (top, left) in zip(canvases, digits, places.tolist(), strict=True):
        canvas[:, top : top + 32, left : left + 32] = torch.maximum(canvas[:, top : top + 32, left : left + 32], digit)
    return canvases, source.labels[picks]


class Searcher(nn.Module):
    """Scores from the small image; k patches of the large one to a class."""

    def __init__(self, method: str, k: int = 4, dim: int = 96) -> None:
        super().__init__()
        self.method, self.k, self.tau = method, k, 1.0
        layers = ((1, 16, 1), (16, 32, 2), (32, 32, 1))  # channels in and out, stride
        convolutions = [nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), nn.ReLU()) for a, b, stride in layers]
        self.scorer = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(GRID), nn.Conv2d(32, 1, 3, padding=1), nn.Flatten())
        self.embed = nn.Linear(PATCH * PATCH, dim)
        self.place = nn.Linear(2, dim)
        self.absent = nn.Parameter(torch.cat([torch.randn(dim) * 0.02, torch.full((2,), (GRID - 1) / 2)]))  # a patch that is not there
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.classify = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(dim))
        self.head = nn.Linear(dim, 10)

    def scores(self, canvases: Tensor) -> Tensor:
        """``(B, 49)``, standardised so that the temperature means the same for every canvas."""
        return F.layer_norm(self.scorer(F.avg_pool2d(canvases, 4)), (GRID * GRID,)) * 2

    def tokens(self, canvases: Tensor) -> Tensor:
        """``(B, 49, dim + 2)``: every patch, embedded, with its row and column."""
        patches = F.unfold(canvases, PATCH, stride=PATCH).transpose(1, 2)  # (B, 49, 256)
        places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).float()
        return torch.cat([self.embed(patches), places.expand(len(canvases), -1, -1)], -1)

    def forward(self, canvases: Tensor) -> Tensor:
        scores = torch.rand(len(canvases), GRID * GRID) if self.method == "random" else self.scores(canvases)
        chosen = self.choose(self.tokens(canvases), scores)
        patches, places = chosen.tensor_split([chosen.shape[-1] - 2], -1)
        places = places - places.mean(1, keepdim=True)  # where a patch lies among the chosen, wherever the digit is
        return self.head(self.classify(patches + self.place(places)).mean(1))

    def choose(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """The k best of 49 tokens; while training k weighted means of all of them (relaxed), or several sets (drawn)."""
        if not self.training or self.method in ("hard", "random"):
            return khot.gather_topk(tokens, scores.detach(), self.k).values
        if self.method in MATRICES:
            return khot.select_topk(tokens, scores, self.k, self.tau, method=MATRICES[self.method])
        if self.method == "straight":
            mask = khot.soft_topk(scores, self.k, self.tau, hard=True)
        else:
            mask, tokens = self.draw(scores), tokens.repeat(SAMPLES, 1, 1)
        # Between absent and present, not between zero and present: the norms that follow do not see a change of scale.
        return self.absent + khot.gather_topk(tokens - self.absent, mask, self.k).values

    def draw(self, scores: Tensor) -> Tensor:
        """``SAMPLES`` sets of k patches a canvas; gradients are divided by the probabilities of the patches (Horvitz and Thompson)."""
        design = "gumbel" if self.method == "gumbel" else "systematic"
        mask = khot.sample_topk(scores.detach(), self.k, self.tau, design=design, num_samples=SAMPLES).flatten(0, 1)
        share = khot.soft_topk(scores, self.k, self.tau).repeat(SAMPLES, 1)
        return mask * (1 + (share - share.detach()) / share.detach().clamp(min=0.05))


def parts(sources: tuple[Memory, Memory], part: str) -> tuple[Memory, Memory]:
    """Digits to train on and digits to evaluate on: the last training digits for "validation", the test digits for "test"."""
    whole, held_out = sources[0], min(HELD_OUT, len(sources[0].labels) // 4)
    training, validation = (
        dataclasses.replace(whole, pixels=whole.pixels[cut], labels=whole.labels[cut]) for cut in (slice(-held_out), slice(-held_out, None))
    )
    return training, validation if part == "validation" else sources[1]


def train(method: str, seed: int, digits: tuple[Memory, Memory], options: argparse.Namespace) -> tuple[Searcher, dict[str, Any]]:
    """Train one searcher; also the record of its accuracy every ``options.every`` steps."""
    torch.manual_seed(seed)
    model, generator = Searcher(method, options.k), torch.Generator().manual_seed(seed)
    canvases, labels = make_canvases(digits[1], options.test, torch.Generator().manual_seed(12345))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps)
    curve, start = [], time.process_time()
    for step in range(1, options.steps + 1):
        model.train().tau = options.tau[0] * (options.tau[1] / options.tau[0]) ** (step / options.steps)
        images, wanted = make_canvases(digits[0], options.batch, generator)
        outputs = model(images)
        loss = F.cross_entropy(outputs, wanted.repeat(len(outputs) // len(wanted)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % options.every == 0 or step == options.steps:
            curve.append((step, accuracy(model, canvases, labels)))
    first, minutes = next((step for step, value in curve if value >= 90), None), round((time.process_time() - start) / 60, 2)
    return model, {"top1": curve[-1][1], "steps_to_90": first, "cpu_minutes": minutes, "curve": curve, **circumstances()}


@torch.no_grad()
def accuracy(model: Searcher, canvases: Tensor, labels: Tensor) -> float:
    model.eval()
    right = [(model(some).argmax(1) == wanted).float() for some, wanted in zip(canvases.split(250), labels.split(250), strict=True)]
    return round(100 * float(torch.cat(right).mean()), 2)


def draw(model: Searcher, canvases: Tensor, out: Path) -> None:
    """The canvases with frames around the chosen patches."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    figure, axes = plt.subplots(2, len(canvases) // 2, figsize=(2.2 * len(canvases) // 2, 4.6))
    chosen = model.eval().scores(canvases).topk(model.k).indices
    for axis, canvas, patches in zip(axes.flat, canvases[:, 0], chosen, strict=True):
        axis.imshow(canvas.numpy(), cmap="gray_r")
        axis.set_axis_off()
        for row, column in ((patch // GRID, patch % GRID) for patch in patches.tolist()):
            box = plt.Rectangle((column * PATCH - 0.5, row * PATCH - 0.5), PATCH, PATCH, fill=False, edgecolor="#d62728", linewidth=1.5)
            axis.add_patch(box)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def run(method: str, seed: int, digits: tuple[Memory, Memory], options: argparse.Namespace) -> dict[str, Any]:
    wanted = {"method": method, "seed": seed, **{name: getattr(options, name) for name in FOUND_BY}}
    done = read([options.records]) if options.records is not None and options.records.exists() else []
    record = next((record for record in done if wanted.items() <= record.items()), None)
    if record is None:
        model, found = train(method, seed, digits, options)
        record = wanted | found
        if options.records is not None:
            append(options.records, record)
        if options.out is not None and method == options.picture:
            draw(model, make_canvases(digits[1], options.test, torch.Generator().manual_seed(12345))[0][:8], options.out)
    shown = ("method", "seed", "part", "steps", "lr", "top1", "steps_to_90", "cpu_minutes")
    print(" ".join(f"{name}={record[name]}" for name in shown), flush=True)
    return record


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, help="folder of MNIST's idx files; default ~/.cache/khot/mnist")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--part", default="test", choices=("validation", "test"), help="which digits the accuracy is measured on")
    parser.add_argument("--picture", default="sample", choices=METHODS, help="whose choices are drawn")
    parser.add_argument("--out", type=Path, help="where the picture goes")
    parser.add_argument("--records", type=Path, help="file of records, one JSON line per run")
    for name, default in (("k", 4), ("steps", 1200), ("batch", 64), ("every", 50), ("test", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--tau", type=float, nargs=2, default=[1.0, 0.3], help="temperature at the start and at the end")
    options = parser.parse_args(arguments)
    if not 1 <= options.k <= GRID * GRID:
        parser.error(f"--k must be between 1 and the {GRID * GRID} patches, got {options.k}")
    digits = parts(load("mnist", options.data_dir), options.part)
    return [run(method, seed, digits, options) for seed in options.seeds for method in options.methods]


if __name__ == "__main__":
    main()
