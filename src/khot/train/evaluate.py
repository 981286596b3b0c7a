"""Top-1 and top-5 of a model on a data set."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from khot.checks import find
from khot.train.batches import Batches
from khot.train.checkpoint import load_weights
from khot.train.config import TrainConfig, from_json
from khot.train.sources import Source, load


class Score(NamedTuple):
    top1: float  # percent
    top5: float
    correct: Tensor  # (n,) bool: whether the first guess was right
    images_per_second: float  # of CPU time, data included


@torch.no_grad()
def evaluate(model: nn.Module, source: Source, subset: Tensor, *, batch_size: int = 250, device: str = "cpu") -> Score:
    """Score ``model`` on ``subset`` of ``source``; with several processes every one scores its share and gets the whole."""
    import ignite.distributed as idist

    model.eval()
    hits = torch.zeros(len(subset), 2, device=device)
    start = time.process_time()
    own = torch.arange(len(subset))[idist.get_rank() :: idist.get_world_size()]
    for places in own.split(batch_size):
        batch = Batches(source, seed=0, augment=False)[0, subset[places]]
        ranked = model(batch.images.to(device)).topk(min(5, source.num_classes)).indices
        found = ranked == batch.labels.to(device)[:, None]
        hits[places.to(device)] = torch.stack([found[:, 0], found.any(1)], 1).float()
    seconds = time.process_time() - start
    hits = torch.as_tensor(idist.all_reduce(hits))
    top1, top5 = (100 * hits.mean(0)).tolist()
    return Score(top1, top5, hits[:, 0].bool().cpu(), len(own) / max(seconds, 1e-9))


def build(config: TrainConfig, num_classes: int) -> nn.Module:
    """The model of a configuration, with its weights and its token reduction, before training."""
    from khot.models import create_model, reduce_tokens

    options = {"num_classes": num_classes} | config.model_options
    try:
        model = create_model(config.model, preset=config.preset, **options)
    except TypeError as error:
        raise ValueError(f"model_options do not fit {config.model}: {error}") from error
    if config.weights is not None:
        _fill(model, load_weights(config.weights)[0], config.weights)
    try:
        return reduce_tokens(model, config.keep[0], **config.reduce) if config.reduce else model
    except TypeError as error:
        raise ValueError(f"reduce does not fit: {error}") from error


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} are of another model: {error}") from error


def on_device(model: nn.Module, device: str) -> nn.Module:
    """``model`` moved there; a device that is unknown or not at hand is refused with its name."""
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def open_model(path: Path) -> tuple[nn.Module, TrainConfig]:
    """The trained model in a safetensors file of ``khot train``, and how it was trained."""
    tensors, metadata = load_weights(path)
    if "config" not in metadata:
        raise ValueError(f"{path} was not written by `khot train`: its header has no configuration")
    try:
        config = from_json(metadata["config"])
    except ValueError as error:
        raise ValueError(f"{path} was not written by `khot train`: {error}") from error
    config.weights = None
    model = build(config, int(metadata["num_classes"]))
    _fill(model, tensors, path)
    set_schedule(model, config.tau[1], config.keep[1])
    return model.eval(), config


def set_schedule(model: nn.Module, tau: float, keep: float) -> None:
    """Set the factor of the temperatures, and the keep rate where tokens are reduced."""
    from khot.models import set_tau_scale

    set_tau_scale(model, tau)
    reduced: Any = model
    if hasattr(reduced, "keep"):
        reduced.keep = keep


def score_lines(path: Path, data_dir: Path | None = None) -> Iterator[tuple[str, str]]:
    """What ``khot eval`` prints, line by line."""
    model, config = open_model(path)
    _, test = load(config.data, data_dir or config.data_dir, size=image_size(config))
    score = evaluate(model, test, torch.arange(len(test.labels)))
    yield "model", f"{config.model} ({config.preset})"
    yield "data", f"{config.data}, {len(test.labels)} test images"
    yield "top-1", f"{score.top1:.2f}"
    yield "top-5", f"{score.top5:.2f}"


def image_size(config: TrainConfig) -> int:
    """Side of the images that the model of ``config`` takes."""
    from khot.models import PRESETS

    return (find(find(PRESETS, config.preset, "preset"), config.model, "model") | config.model_options)["image_size"]
