"""Which tokens of a pruned ViT are kept whatever an attacker does within eps, and for which images the class is certain.

    python examples/certified_pruning.py --data_dir DIRECTORY_OF_MNIST --weights vit.pt --records records.jsonl --figure certified.png

A small ViT (28 x 28 pixels, 16 patches) is trained on MNIST in a few minutes, or read from ``--weights`` if that file is there. Its first
block drops half of the patches by the attention of the class token. No case is enumerated: one pass bounds them all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import khot
from khot.models import ViT
from khot.train.sources import load

NETS: dict[str, dict[int, int]] = {"pruned": {0: 8, 1: 4}, "full": {}}
ROWS = (("pruned", "affine"), ("pruned", "box"), ("full", "affine"))
EPS = (0.0005, 0.001, 0.002, 0.004)


def build() -> ViT:
    """Positions and class token start large: at the usual .02 layer norm would magnify every perturbation of an empty patch."""
    torch.manual_seed(0)
    model = ViT(image_size=28, patch_size=7, in_channels=1, num_classes=10, dim=64, depth=2, num_heads=4, mlp_ratio=2)
    for parameter in (model.pos_embed, model.cls_token):
        nn.init.normal_(parameter, std=0.5)
    return model


def train(images: Tensor, labels: Tensor, steps: int, batch: int = 128) -> ViT:
    """AdamW on images with a little uniform noise."""
    model = build().train()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(0, len(images), (batch,))
        noisy = images[rows] + 0.1 * (torch.rand(batch, *images.shape[1:]) - 0.5)
        loss = F.cross_entropy(model(noisy), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def hard(model: ViT, keep: dict[int, int], images: Tensor) -> Tensor:
    """The logits of the network itself, reduced in place for the time of the call."""
    if not keep:
        return model(images)
    khot.reduce_tokens(model, keep=0.5, at=tuple(keep))
    out = model(images)
    khot.restore_tokens(model)
    return out


def attack(model: ViT, keep: dict[int, int], image: Tensor, label: int, eps: float, steps: int = 10) -> bool:
    """Whether projected gradient ascent on the loss, from the image and from two random corners, changes the class."""
    start = torch.cat([torch.zeros_like(image), torch.randn(2, *image.shape[1:]).sign() * eps])
    target, moved = torch.full((3,), label), start
    for _ in range(steps):
        moved = moved.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(hard(model, keep, image + moved), target), moved)
        moved = (moved + eps / 4 * slope.sign()).clamp(-eps, eps)
    with torch.no_grad():
        return bool((hard(model, keep, image + moved).argmax(-1) != label).any())


def examine(model: ViT, net: str, domain: str, image: Tensor, label: int, eps: float) -> dict[str, float]:
    """One image: what is certain of it, and whether an attack says otherwise."""
    keep, start = NETS[net], time.process_time()
    found = khot.bounds.certify(model, image, eps, domain=domain, keep=keep)
    seconds = time.process_time() - start  # of the CPU
    plain = int(hard(model, keep, image).argmax(-1))
    fooled = attack(model, keep, image, plain, eps)
    certain = bool(found.certain) and int(found.label) == plain
    row = {"accuracy": plain == label, "certified": certain and plain == label, "attacked": plain == label and not fooled}
    row |= {"refuted": certain and fooled, "width": round(float((found.upper - found.lower).mean()), 3), "seconds": round(seconds, 3)}
    return row | {f"decided_{block}": round(float(decided.share), 4) for block, decided in found.decided.items()}


def measure(model: ViT, images: Tensor, labels: Tensor, eps: Sequence[float], records: Path | None, minutes: float) -> list[dict[str, Any]]:
    """One cell per image, net, domain and eps, appended to ``records`` as it comes; those that are there already are not run again."""
    cells = [json.loads(line) for line in records.read_text().splitlines()] if records is not None and records.exists() else []
    done = {(cell["image"], cell["net"], cell["domain"], cell["eps"]) for cell in cells}
    start = time.monotonic()
    for i, (image, label) in enumerate(zip(images.split(1), labels.tolist(), strict=True)):
        for net, domain, e in [(net, domain, e) for net, domain in ROWS for e in eps if (i, net, domain, e) not in done]:
            torch.manual_seed(i)  # of the attack
            cells.append({"image": i, "net": net, "domain": domain, "eps": e} | examine(model, net, domain, image, label, e))
            if records is not None:
                with records.open("a") as file:
                    file.write(json.dumps(cells[-1]) + "\n")
        print(f"\r{i + 1} of {len(images)} images, {time.monotonic() - start:.0f} s", end="", file=sys.stderr)
        if time.monotonic() - start > 60 * minutes:
            break
    chosen = [(net, domain, e) for net, domain in ROWS for e in eps]
    return [summary(*key, [cell for cell in cells if (cell["net"], cell["domain"], cell["eps"]) == key]) for key in chosen]


def summary(net: str, domain: str, eps: float, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the images."""
    names = [name for name in cells[0] if name not in ("image", "net", "domain", "eps")]
    means = {name: sum(float(cell[name]) for cell in cells) / len(cells) for name in names}
    refuted = sum(bool(cell["refuted"]) for cell in cells)
    return {"net": net, "domain": domain, "eps": eps, "images": len(cells)} | means | {"refuted": refuted}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))

    def line(axis: Any, net: str, domain: str, name: str, label: str, style: str) -> None:
        chosen = [row for row in rows if row["net"] == net and row["domain"] == domain]
        axis.plot([row["eps"] for row in chosen], [100 * row[name] for row in chosen], style, label=label)

    for domain, style in (("affine", "o-"), ("box", "s--")):
        for block in (0, 1):
            line(left, "pruned", domain, f"decided_{block}", f"{domain}, block {block}", style)
    for net in NETS:
        line(right, net, "affine", "certified", f"{net}, certified", "o-")
        line(right, net, "affine", "attacked", f"{net}, under attack", "^:")
    left.set_ylabel("tokens decided (%)")
    right.set_ylabel("test images (%)")
    for axis in (left, right):
        axis.set_xscale("log")
        values = sorted({row["eps"] for row in rows})
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.set_xticks([], minor=True)
        axis.set_xlabel("eps (pixels in [0, 1])")
        axis.set_ylim(-3, 103)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        decided = "  ".join(f"block {name[-1]} {100 * row[name]:5.1f} %" for name in row if name.startswith("decided"))
        print(
            f"{row['net']:6} {row['domain']:6} eps {row['eps']:.4f}  images {row['images']}  correct {100 * row['accuracy']:5.1f}"
            f"  certified {100 * row['certified']:5.1f}  attacked {100 * row['attacked']:5.1f}  refuted {row['refuted']}"
            f"  {row['seconds']:.2f} s  {decided}"
        )


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, help="where the files of MNIST are")
    parser.add_argument("--weights", type=Path, help="a state dict: read if it is there, else written after training")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--count", type=int, default=200, help="test images")
    parser.add_argument("--minutes", type=float, default=1e9, help="no further image after so long")
    parser.add_argument("--eps", type=float, nargs="+", default=EPS)
    parser.add_argument("--records", type=Path, help="a JSON line per cell is appended here; a second run goes on where the first stopped")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--quick", action="store_true", help="a hundred steps, two images, two eps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.count, options.eps = 100, 2, (0.0005, 0.002)
    data, test = load("mnist", options.data_dir)
    if options.weights is not None and options.weights.exists():
        model = build().eval()
        model.load_state_dict(torch.load(options.weights, weights_only=True))
    else:
        model = train(data.images(torch.arange(len(data.labels)), None), data.labels, options.steps)
        if options.weights is not None:
            torch.save(model.state_dict(), options.weights)
    chosen = torch.arange(options.count)
    rows = measure(model, test.images(chosen, None), test.labels[chosen], options.eps, options.records, options.minutes)
    show(rows)
    if options.figure is not None:
        draw(rows, options.figure)
    return rows


if __name__ == "__main__":
    main()
