"""What a run is made of: one dataclass, by file and by flags."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

RECIPES = Path(__file__).parent / "recipes"
FREE = ("out", "records", "data_dir", "workers", "save_every", "log_every", "progress", "tensorboard", "device")  # may change on resume


@dataclasses.dataclass(kw_only=True)
class TrainConfig:
    """One training run.

    Args:
        model: a name of khot.models.MODELS.
        preset: the size of the model: tiny or base.
        model_options: arguments of the model that override the preset's.
        weights: a safetensors file to start from.
        reduce: arguments of khot.reduce_tokens, e.g. {at: [1, 3, 4], score: cls}; empty for none.
        keep: keep rate at the start and at the end of training; the rate moves linearly between them.
        tau: factor of the temperatures at the start and at the end; it moves geometrically.
        data: fashion_mnist, mnist, cifar10, imagenet or folder.
        data_dir: where the files are.
        validation: how many training images are held back to follow the training; the test part is used once, at the end.
        out: folder of checkpoint, log and weights.
        records: file of run records; a line is added when the run ends. Default: records.jsonl in out.
        seed: of weights, order, augmentation and everything random.
        epochs: passes over the training images.
        batch_size: images a step, over all processes.
        accumulate: a step is computed in this many parts.
        lr: highest learning rate, reached after warmup_epochs; then a cosine down to min_lr.
        weight_decay: of AdamW, for matrices only.
        clip: largest norm of the gradient; 0 for none.
        label_smoothing: share of the target that goes to all classes.
        mixup: parameter of the Beta distribution; 0 for none.
        cutmix: parameter of the Beta distribution; 0 for none.
        flip: mirror half of the images.
        pad: shift by up to this many pixels.
        erase: probability that a square is erased.
        ema: decay of the running mean of the weights, which is then what is tested; 0 for none.
        amp: type that autocast computes in.
        workers: processes that make batches.
        save_every: steps between checkpoints.
        log_every: steps between lines of the log.
        progress: show a bar on the terminal.
        tensorboard: also write TensorBoard files.
        device: cpu, cuda, ...
    """

    model: str = "vit"
    preset: str = "tiny"
    model_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    weights: Path | None = None
    reduce: dict[str, Any] = dataclasses.field(default_factory=dict)
    keep: tuple[float, float] = (1.0, 1.0)
    tau: tuple[float, float] = (1.0, 1.0)
    data: str = "fashion_mnist"
    data_dir: Path | None = None
    validation: int = 5000
    out: Path = Path("runs/khot")
    records: Path | None = None
    seed: int = 0
    epochs: int = 10
    batch_size: int = 128
    accumulate: int = 1
    lr: float = 1e-3
    min_lr: float = 1e-5
    warmup_epochs: float = 0.5
    weight_decay: float = 0.05
    clip: float = 1.0
    label_smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    flip: bool = True
    pad: int = 2
    erase: float = 0.0
    ema: float = 0.0
    amp: Literal["none", "bfloat16", "float16"] = "none"
    workers: int = 0
    save_every: int = 200
    log_every: int = 50
    progress: bool = True
    tensorboard: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "min_lr", "warmup_epochs", "weight_decay", "clip", "mixup", "cutmix", "pad", "workers", "validation"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("label_smoothing", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if not all(0 < rate <= 1 for rate in self.keep):
            raise ValueError(f"keep must lie in (0, 1], got {self.keep}")
        if self.keep != (1.0, 1.0) and not self.reduce:
            raise ValueError(f"keep={self.keep} drops no tokens without reduce; say where, e.g. --reduce '{{\"at\": [1, 3, 4]}}'")
        if not all(factor > 0 for factor in self.tau):
            raise ValueError(f"tau must be positive, got {self.tau}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must lie in [0, 1), got {self.ema}")

    def to_json(self) -> str:
        """The configuration as JSON, paths as strings."""
        return json.dumps(dataclasses.asdict(self), default=str, sort_keys=True)

    def learning_rate(self, step: int, total: int, per_epoch: int) -> float:
        """Linear warm-up, then half a cosine."""
        warmup = round(self.warmup_epochs * per_epoch)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, total - warmup)
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * progress)) / 2

    def tau_at(self, progress: float) -> float:
        return self.tau[0] * (self.tau[1] / self.tau[0]) ** progress

    def keep_at(self, progress: float) -> float:
        return self.keep[0] + (self.keep[1] - self.keep[0]) * progress


def from_json(text: str) -> TrainConfig:
    """The inverse of :meth:`TrainConfig.to_json`; a setting that is younger than the text has its default."""
    values: Any = json.loads(text)
    odd = sorted(values.keys() - {field.name for field in dataclasses.fields(TrainConfig)}) if isinstance(values, dict) else [text[:40]]
    if odd:
        raise ValueError(f"it holds {', '.join(odd)}, which is no setting of a run")
    found: dict[str, Any] = dict(values)
    found |= {name: Path(found[name]) for name in ("weights", "data_dir", "out", "records") if found.get(name) is not None}
    found |= {name: tuple(found[name]) for name in ("keep", "tau") if name in found}
    return TrainConfig(**found)


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """What must not change between the parts of one run, and did."""
    before, after = dataclasses.asdict(old), dataclasses.asdict(new)
    return [f"{name}: {before[name]} -> {after[name]}" for name in before if name not in FREE and before[name] != after[name]]


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Flags, ``--config FILE`` and ``--recipe NAME`` to a configuration; later ones win."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="khot train", description="Train a model; the same command again resumes it where it stopped.")
    parser.add_argument("--config", action="config", help="YAML file of the flags below")
    names = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    parser.add_argument("--recipe", help=f"a configuration that comes with khot: {names}")
    parser.add_class_arguments(TrainConfig, as_group=False)
    given = parser.parse_args(_with_recipes(arguments)).as_dict()
    return TrainConfig(**{field.name: given[field.name] for field in dataclasses.fields(TrainConfig)})


def _with_recipes(arguments: Sequence[str]) -> list[str]:
    """Every ``--recipe NAME`` becomes ``--config FILE``."""
    out, items = [], iter(arguments)
    for item in items:
        flag, _, value = item.partition("=")
        if flag == "--recipe":
            item = f"--config={_recipe(value or next(items, ''))}"
        out.append(item)
    return out


def _recipe(name: str) -> Path:
    from khot.checks import find

    return find({path.stem: path for path in RECIPES.glob("*.yaml")}, name, "recipe")
