"""Drop tokens of a trained ViT: accuracy against images per second for every score, and a picture of the tokens that are kept.

    khot train --recipe cifar10 --model vit --out runs/cifar10-vit-0
    python examples/token_reduction.py runs/cifar10-vit-0/model.safetensors --out tokens.png --figure speed.png

Off the shelf: nothing is trained here. To fine-tune with reduction, start a run from the same weights, and give what it learned to
``--tuned``:

    khot train --recipe cifar10 --model vit --weights runs/cifar10-vit-0/model.safetensors --epochs 2 --lr 2e-4 \\
        --reduce '{"at": [1, 3, 4], "score": "cls"}' --keep '[0.5, 0.5]' --out runs/cifar10-vit-0-keep50
    python examples/token_reduction.py runs/cifar10-vit-0/model.safetensors --tuned runs/cifar10-vit-0-keep50/model.safetensors
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
from khot.train.records import circumstances, pack, read, unpack
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


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per choice and keep rate, the whole model first, then the fine-tuned ones."""
    model, config = open_model(options.weights)
    _, test = load(config.data, options.data_dir or config.data_dir, size=image_size(config))
    count = min(options.count, len(test.labels))
    facts = {"data": config.data, "seed": config.seed, "images": count, "base": config.to_json()} | circumstances()
    rows = [{"choice": "all tokens", "tuned": False, "keep": 1.0} | measure(model, test, count) | facts]
    for name, how in CHOICES.items():
        for rate in options.keep:
            at = options.at[:1] if "centre" in name else options.at
            khot.reduce_tokens(model, rate, at=at, **how)
            rows.append({"choice": name, "tuned": False, "keep": rate, "at": at} | measure(model, test, count) | facts)
    khot.restore_tokens(model)
    return rows + [tuned(path, test, count) | facts for path in options.tuned]


def tuned(path: Path, test: Source, count: int) -> dict[str, Any]:
    """A model that was fine-tuned with its tokens reduced."""
    model, config = open_model(path)
    how = config.reduce
    name = next((name for name, choice in CHOICES.items() if choice == {key: how[key] for key in ("score", "fuse") if key in how}), "")
    name = name or f"{how.get('score', 'cls')}, {how.get('gradient', 'straight')}"
    facts = {"choice": name, "tuned": True, "keep": config.keep[1], "at": how.get("at"), "epochs": config.epochs}
    return facts | measure(model, test, count)


def show(rows: list[dict[str, Any]]) -> None:
    """Each row against the whole model, on the same images; the fine-tuned ones against CLS attention at the same keep rate too."""
    for row in rows:
        one, many = (row[name] / rows[0][name] for name in ("images_per_second_batch_1", "images_per_second"))
        line = f"{row['choice']:28} {'tuned' if row['tuned'] else '':5} keep {row['keep']:4.2f}  top-1 {row['top1']:5.2f}"
        line += f"  lost {difference(rows[0], row)}  MACs /{rows[0]['macs'] / row['macs']:4.2f}  speed x{many:4.2f}, batch 1 x{one:4.2f}"
        rivals = [each for each in rows if row["tuned"] and each["tuned"] and each["keep"] == row["keep"]]
        rival = next((each for each in rivals if each["choice"] == "cls attention" and each is not row), None)
        print(line + (f"  over cls {difference(row, rival)}" if rival else ""))


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Points of top-1 by which ``one`` is ahead, with half of the paired 95 % interval."""
    gained = unpack(one["correct"]).double() - unpack(other["correct"]).double()
    return f"{100 * float(gained.mean()):5.2f} ± {196 * float(gained.std(correction=0)) / len(gained) ** 0.5:4.2f}"


def plot(rows: list[dict[str, Any]], out: Path) -> None:
    """Accuracy against images per second, one line per choice."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    figure, axis = plt.subplots(figsize=(7.5, 4.6))
    names = list(dict.fromkeys(row["choice"] for row in rows[1:]))
    for name, is_tuned in dict.fromkeys((row["choice"], row["tuned"]) for row in rows[1:]):
        line = [row for row in rows[1:] if (row["choice"], row["tuned"]) == (name, is_tuned)]
        speeds, scores = ([row[key] for row in line] for key in ("images_per_second", "top1"))
        style, label = ("s--", f"{name}, fine-tuned") if is_tuned else ("o-", name)
        axis.plot(speeds, scores, style, color=f"C{names.index(name)}", label=label, markersize=5)
    axis.plot(rows[0]["images_per_second"], rows[0]["top1"], "k*", markersize=13, label="all tokens")
    axis.set(xlabel="images per second, batch 64, one thread", ylabel=f"top-1 of {rows[0]['images']} test images, %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def draw(weights: Path, data_dir: Path | None, at: list[int], keep: float, out: Path, count: int = 6) -> None:
    """Test images with the dropped patches faded, block by block."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
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
    parser.add_argument("--tuned", type=Path, nargs="*", default=[], help="the same of runs that were fine-tuned with reduction")
    parser.add_argument("--data_dir", type=Path)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 3, 4], help="blocks that drop tokens")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.9, 0.7, 0.5, 0.25])
    parser.add_argument("--count", type=int, default=10_000, help="test images")
    parser.add_argument("--out", type=Path, help="where the picture of kept tokens goes")
    parser.add_argument("--figure", type=Path, help="where accuracy against speed goes")
    parser.add_argument("--records", type=Path, help="JSON lines are written here; what is there already is shown and drawn, not measured")
    options = parser.parse_args(arguments)
    if options.records is not None and options.records.exists():
        rows = read([options.records])
    else:
        rows = compare(options)
        if options.records is not None:
            options.records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(rows)
    if options.figure is not None:
        plot(rows, options.figure)
    if options.out is not None:
        draw(options.weights, options.data_dir, options.at, min(options.keep, key=lambda rate: abs(rate - 0.5)), options.out)
    return rows


if __name__ == "__main__":
    main()
