"""Every method, every k and every seed trained at once: one batched network, one optimiser, one budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import khot
from khot.demo.data import NUM_CLASSES, NUM_PIXELS, Part, Split

HIDDEN = 32
BATCH = 64
SELECTING = 0.5  # the share of the steps in which pixels may still change
TAU = (1.0, 0.01)  # the temperature falls from the first to the second while pixels are selected
RATE, SCORE_RATE = 0.01, 0.1  # of the network and of the scores
NUM_CHECKS = 5  # looks at the validation part, all in the second half

METHODS = ("learned", "hard", "information", "variance", "random")


class Result(NamedTuple):
    """Per seed, method and k: the test accuracy, and the pixels ``(seeds, methods, ks, 64)`` that were looked at."""

    accuracy: Tensor
    pixels: Tensor


@dataclass
class Networks:
    """64 -> 32 -> 10 with a mask on the pixels; leading dimensions are seeds, methods, ks. Equal weights for every method at the start."""

    weights: list[Tensor]

    @classmethod
    def make(cls, seeds: int, methods: int, ks: int, generator: torch.Generator) -> Networks:
        shapes = [(NUM_PIXELS, HIDDEN), (1, HIDDEN), (HIDDEN, NUM_CLASSES), (1, NUM_CLASSES)]
        scales = [0.18, 0.0, HIDDEN**-0.5, 0.0]
        draws = [
            torch.randn(seeds, 1, ks, *shape, dtype=torch.float32, device="cpu", generator=generator) * scale
            for shape, scale in zip(shapes, scales, strict=True)
        ]
        return cls([draw.repeat(1, methods, 1, 1, 1).requires_grad_() for draw in draws])

    def __call__(self, images: Tensor, mask: Tensor) -> Tensor:
        """``(seeds, m, 64)``, ``(seeds, methods, ks, 64)`` -> logits ``(seeds, methods, ks, m, 10)``."""
        first, bias, second, last_bias = self.weights
        seeds, methods, ks, pixels, hidden = first.shape
        masked = (first * mask.unsqueeze(-1)).permute(0, 3, 1, 2, 4).reshape(seeds, pixels, -1)
        inner = F.relu(torch.baddbmm(bias.view(seeds, 1, -1), images, masked))
        return inner.view(seeds, -1, methods, ks, hidden).permute(0, 2, 3, 1, 4) @ second + last_bias


def train(split: Split, ks: Sequence[int], steps: int, method: str, tick: Callable[[], None]) -> Result:
    """Train all of them for ``steps`` steps, keep each one's best weights on the validation part, then look at the test part once."""
    seeds, size = split.train.labels.shape
    generator = torch.Generator().manual_seed(0)
    networks = Networks.make(seeds, len(METHODS), len(ks), generator)
    k = torch.tensor(ks, dtype=torch.long, device="cpu").expand(seeds, len(METHODS), len(ks))
    fixed, scores = _first_scores(split, len(ks), generator)
    optimizer = torch.optim.Adam([{"params": networks.weights, "lr": RATE}, {"params": [scores], "lr": SCORE_RATE}], fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps)))
    best = _Best(networks)
    for step in range(steps):
        mask = _mask(torch.cat([scores, fixed], 1), k, step / (SELECTING * steps), method)
        batch = _batch(split.train, torch.randint(size, (seeds, BATCH), dtype=torch.long, device="cpu", generator=generator))
        loss = _loss(networks(batch.images, mask), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step + 1 == steps or step > SELECTING * steps and (step + 1) % max(1, steps // (2 * NUM_CHECKS)) == 0:
            best.look(mask.detach(), split.validation)
        tick()
    test = Part(split.test.images.expand(seeds, -1, -1), split.test.labels.expand(seeds, -1))
    return Result(_accuracy(best.networks, best.mask, test), best.mask)


def _first_scores(split: Split, ks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scores that stay, ``(seeds, 3, ks, 64)``: mutual information, variance, chance; and scores to be learned, ``(seeds, 2, ks, 64)``."""
    seeds = split.train.labels.shape[0]
    ranked = torch.stack([_information(split.train), split.train.images.var(1)], 1).unsqueeze(2).expand(-1, -1, ks, -1)
    chance = torch.rand(seeds, 1, ks, NUM_PIXELS, dtype=torch.float32, device="cpu", generator=generator)
    learned = 0.01 * torch.randn(seeds, 1, ks, NUM_PIXELS, dtype=torch.float32, device="cpu", generator=generator)
    return torch.cat([ranked, chance], 1), learned.repeat(1, 2, 1, 1).requires_grad_()


def _information(train: Part) -> Tensor:
    """Mutual information of each pixel's 17 grey levels with the label, ``(seeds, 64)``."""
    from sklearn.feature_selection import mutual_info_classif

    discrete: dict[str, Any] = {"discrete_features": True}  # its own annotation allows a string only
    pairs = zip((train.images * 16).numpy(), train.labels.numpy(), strict=True)
    return torch.stack([torch.tensor(mutual_info_classif(x, y, **discrete), dtype=torch.float32, device="cpu") for x, y in pairs])


def _mask(scores: Tensor, k: Tensor, progress: float, method: str) -> Tensor:
    """What each method lets through: soft and annealed, hard with a gradient to the chosen pixels only, or fixed."""
    hard = khot.topk_mask(scores, k)
    if progress >= 1:
        return hard
    tau = TAU[0] * (TAU[1] / TAU[0]) ** progress
    soft = khot.soft_topk(scores[:, :1], k[:, :1], tau, method=method)
    gates = khot.straight_through(torch.ones_like(soft), scores[:, 1:2])
    return torch.cat([soft, hard[:, 1:2] * gates, hard[:, 2:]], 1)


def _batch(part: Part, index: Tensor) -> Part:
    images = part.images.gather(1, index.unsqueeze(-1).expand(-1, -1, NUM_PIXELS))
    return Part(images, part.labels.gather(1, index))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, summed over the networks: each has a gradient of its own."""
    target = labels[:, None, None].expand(logits.shape[:-1])
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum") / labels.shape[-1]


@torch.no_grad()
def _accuracy(networks: Networks, mask: Tensor, part: Part) -> Tensor:
    right = networks(part.images, mask).argmax(-1) == part.labels[:, None, None]
    return right.float().mean(-1)  # (seeds, methods, ks)


class _Best:
    """The weights and pixels of each network at its best validation accuracy so far."""

    def __init__(self, networks: Networks) -> None:
        self.live, self.networks = networks, Networks([weight.detach().clone() for weight in networks.weights])
        self.mask, self.accuracy = torch.empty(0, dtype=torch.float32, device="cpu"), torch.tensor(-1.0, dtype=torch.float32, device="cpu")

    def look(self, mask: Tensor, part: Part) -> None:
        accuracy = _accuracy(self.live, mask, part)
        better = (accuracy >= self.accuracy)[..., None, None]
        pairs = zip(self.live.weights, self.networks.weights, strict=True)
        self.networks = Networks([torch.where(better, new.detach(), old) for new, old in pairs])
        self.accuracy, self.mask = torch.maximum(accuracy, self.accuracy), mask
