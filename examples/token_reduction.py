"""Drop tokens of a trained ViT: accuracy against images per second for every score, and a picture of the tokens that are kept.

    khot train --recipe cifar10 --model vit --out runs/cifar10-vit-0
    python examples/token_reduction.py runs/cifar10-vit-0/model.safetensors --out tokens.png

Off the shelf: nothing is trained here. To fine-tune with reduction, start a run from the same weights:

    khot train --recipe cifar10 --model vit --weights runs/cifar10-vit-0/model.safetensors --epochs 2 --lr 2e-4 \\
        --reduce '{"at": [1, 3, 4], "score": "cls"}' --keep '[0.5, 0.5]' --out runs/cifar10-vit-0-keep50
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import khot
from khot.models import count_macs
from khot.train.batches import Batches
from khot.train.evaluate import evaluate, image_size, open_model
from khot.train.records import pack, unpack
from khot.train.sources import Source, load


def centre_distance(tokens: Tensor) -> Tensor:
    """Patches near the middle of the image first: the control that looks at nothing."""
    side = round(tokens.shape[1] ** 0.5)
    place = torch.arange(side, dtype=torch.float32) - (side - 1) / 2
    return -(place[:, None] ** 2 + place[None] ** 2).flatten()[: tokens.shape[1]].expand(len(tokens), -1)


# Distance is from the middle of the whole image, so that this control reduces once only.
CHOICES: dict[str, dict[str, Any]] = {
    "cls attention": {"score": "cls"},
    "cls attention, fused": {"score": "cls", "fuse": True},
    "received attention": {"score": "received"},
    "random": {"score": "random"},
    "centre, at the first block": {"score": centre_distance},
}


def measure(model: nn.Module, test: Source, count: int) -> dict[str, Any]:
    """Accuracy on ``count`` test images, MACs, and speed of the model alone at batch 64 and 1."""
    torch.manual_seed(0)
    score = evaluate(model, test, torch.arange(count))
    images = Batches(test, seed=0, augment=False)[0, torch.arange(64)].images
    return {
        "top1": round(score.top1, 2),
        "correct": pack(score.correct),
        "macs": count_macs(model, 1, *images.shape[1:]),
        "images_per_second": speed(model, images),
        "images_per_second_batch_1": speed(model, images[:1]),
    }


@torch.no_grad()
def speed(model: nn.Module, images: Tensor, repeats: int = 7) -> float:
    """Images per second of CPU time, the best of a few repetitions."""
    model(images)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        model(images)
        times.append(time.process_time() - start)
    return round(len(images) / min(times), 1)


def compare(weights: Path, data_dir: Path | None, at: list[int], rates: list[float], count: int) -> list[dict[str, Any]]:
    """One row per choice and keep rate, the whole model first."""
    model, config = open_model(weights)
    _, test = load(config.data, data_dir or config.data_dir, size=image_size(config))
    count = min(count, len(test.labels))
    rows = [{"choice": "all tokens", "keep": 1.0} | measure(model, test, count)]
    for name, options in CHOICES.items():
        for rate in rates:
            khot.reduce_tokens(model, rate, at=at[:1] if "centre" in name else at, **options)
            rows.append({"choice": name, "keep": rate} | measure(model, test, count))
    khot.restore_tokens(model)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    whole = unpack(rows[0]["correct"]).double()
    for row in rows:
        lost = whole - unpack(row["correct"]).double()
        margin = 196 * float(lost.std(correction=0)) / len(lost) ** 0.5
        one, many = (row[name] / rows[0][name] for name in ("images_per_second_batch_1", "images_per_second"))
        print(
            f"{row['choice']:28} keep {row['keep']:4.2f}  top-1 {row['top1']:5.2f}  lost {100 * float(lost.mean()):5.2f} ± {margin:4.2f}"
            f"  MACs /{rows[0]['macs'] / row['macs']:4.2f}  speed x{many:4.2f}, batch 1 x{one:4.2f}"
        )


def draw(weights: Path, data_dir: Path | None, at: list[int], keep: float, out: Path, count: int = 6) -> None:
    """Test images with the dropped patches faded, block by block."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    model, config = open_model(weights)
    _, test = load(config.data, data_dir or config.data_dir, size=image_size(config))
    khot.reduce_tokens(model, keep, at=at)
    model(Batches(test, seed=0, augment=False)[0, torch.arange(count)].images)
    images = test.images(torch.arange(count), None)
    figure, axes = plt.subplots(count, 1 + len(at), figsize=(1.5 * (1 + len(at)), 1.5 * count), squeeze=False)
    kept_by_block, patch = model.kept_tokens, model.patch_embed.patch_size
    for i, row in enumerate(axes):
        row[0].imshow(_picture(images[i], None, patch).numpy(), cmap="gray")
        for axis, (block, kept) in zip(row[1:], kept_by_block.items(), strict=True):
            axis.imshow(_picture(images[i], kept[i], patch).numpy(), cmap="gray")
            axis.set_title(f"block {block}: {kept.shape[1]}", fontsize=8)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def _picture(image: Tensor, kept: Tensor | None, patch: int) -> Tensor:
    """``(H, W, C)``, or ``(H, W)`` for one channel; patches that are not kept are faded to white."""
    pixels = image
    if kept is not None:
        grid = image.shape[-1] // patch
        mask = torch.zeros(grid * grid).scatter(0, kept[kept >= 0], 1.0).view(grid, grid)
        mask = mask.repeat_interleave(patch, 0).repeat_interleave(patch, 1)
        pixels = image * mask + (0.8 + 0.2 * image) * (1 - mask)
    return pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="model.safetensors of a ViT trained by khot train")
    parser.add_argument("--data_dir", type=Path)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 3, 4], help="blocks that drop tokens")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.9, 0.7, 0.5, 0.25])
    parser.add_argument("--count", type=int, default=10_000, help="test images")
    parser.add_argument("--out", type=Path, help="where the picture goes")
    parser.add_argument("--records", type=Path, help="JSON lines are added here")
    options = parser.parse_args(arguments)
    rows = compare(options.weights, options.data_dir, options.at, options.keep, options.count)
    show(rows)
    if options.records is not None:
        with options.records.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if options.out is not None:
        draw(options.weights, options.data_dir, options.at, min(options.keep, key=lambda rate: abs(rate - 0.5)), options.out)
    return rows


if __name__ == "__main__":
    main()
