"""The table of results, from run records; what was not run says so, with the command that runs it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from khot.train.records import Record, unpack

TITLES = {
    "vit": "ViT",
    "topk_dynamic": "TopKDynamicModel",
    "topk_attention": "TopKAttentionModel",
    "topk_attention_none": "TopKAttentionModel, no mixing",
    "topk_attention_attend": "TopKAttentionModel, attends among the k",
    "topk": "TopKModel",
    "mixer": "MLP-mixer",
}
DATA = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "imagenet": "ImageNet", "mnist": "MNIST"}
PLANNED = ("fashion_mnist", "cifar10", "imagenet")
HEADER = ["Model", "Dataset", "Top-1", "Top-5", "Parameters", "MACs", "Images/s", "k", "Keep", "Epochs", "Seeds", "CPU-min", "Off-diagonal"]
NUMERIC = 11  # columns after the data set


class Group(NamedTuple):
    """Runs that differ in their seed alone."""

    model: str
    data: str
    options: str  # JSON of what the model, the reduction and the training have of their own
    runs: list[Record]


def table(records: Iterable[Record]) -> list[list[str]]:
    """Rows of text, header first: every planned model and data set, then whatever else was run."""
    groups = group(records)
    rows = [HEADER]
    for data in [*PLANNED, *sorted({each.data for each in groups} - set(PLANNED))]:
        for model in TITLES:
            found = [each for each in groups if (each.model, each.data) == (model, data)]
            rows += [_row(each) for each in found] or ([_missing(model, data)] if data in PLANNED else [])
    return rows


def group(records: Iterable[Record]) -> list[Group]:
    """Runs by everything but the seed; of two records of one run the later counts. Records of other things have no config."""
    kinds: dict[tuple[str, str, str], dict[int, Record]] = {}
    for record in (each for each in records if "config" in each):
        missing = sorted({"model", "data", "seed", "top1", "top5"} - record.keys())
        if missing:
            raise ValueError(f"a record of a run has no {', '.join(missing)}: {str(record)[:60]}")
        kinds.setdefault((record["model"], record["data"], _own(record)), {})[record["seed"]] = record
    return [Group(*kind, [seeds[seed] for seed in sorted(seeds)]) for kind, seeds in kinds.items()]


def _own(record: Record) -> str:
    config = record["config"]
    kept = ("preset", "model_options", "reduce", "keep", "tau", "epochs", "weights", "lr", "mixup", "cutmix", "ema")
    return json.dumps({name: config.get(name) for name in kept}, sort_keys=True)


def _row(each: Group) -> list[str]:
    first, config = each.runs[0], each.runs[0]["config"]
    shares = [statistics.mean(column) for column in zip(*(run["off_diagonal"] for run in each.runs), strict=True)]
    return [
        ", ".join([TITLES[each.model], *_details(config)]),
        DATA.get(each.data, each.data),
        _mean(each.runs, "top1"),
        _mean(each.runs, "top5"),
        f"{first['parameters'] / 1e6:.2f} M",
        f"{first['macs'] / 1e6:.0f} M",
        f"{statistics.mean(run['images_per_second'] for run in each.runs):.0f}",
        str(_k(each.model, config)),
        f"{config['keep'][1]:g}",
        str(config["epochs"]),
        str(len(each.runs)),
        f"{statistics.mean(run['cpu_minutes'] for run in each.runs):.0f}",
        " ".join(f"{share:.2f}" for share in shares),
    ]


def _details(config: Record) -> list[str]:
    """What differs from the preset, and how tokens are reduced."""
    options, reduce = config.get("model_options") or {}, config.get("reduce") or {}
    shown = {name: value for name, value in options.items() if name not in ("image_size", "in_channels", "num_classes", "k")}
    details = [str(value) if name in ("method", "stem") else f"{name.replace('_', ' ')} {value}" for name, value in shown.items()]
    if reduce:
        details.append(f"tokens by {reduce.get('score', 'cls')}" + (f", {reduce['gradient']}" if "gradient" in reduce else ""))
    return details + (["tuned"] if config.get("weights") else [])


def _missing(model: str, data: str) -> list[str]:
    command = f"`khot train --recipe {data} --model {model} --out runs/{data}-{model}-0`"
    return [TITLES[model], DATA[data], "not run", command, *[""] * (len(HEADER) - 4)]


def _k(model: str, config: Record) -> object:
    from khot.models import PRESETS

    return (PRESETS[config["preset"]][model] | (config.get("model_options") or {})).get("k", "")


def _mean(runs: list[Record], name: str) -> str:
    values = [run[name] for run in runs]
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


class Difference(NamedTuple):
    """Points of top-1 by which one run is ahead of another on the same images."""

    points: float
    low: float  # ends of the 95 % interval
    high: float


def compare(one: Record, other: Record) -> Difference:
    """The paired difference in top-1 with its normal 95 % interval, from what both got right image by image."""
    gained = unpack(one["correct"]).double() - unpack(other["correct"]).double()
    margin = 1.96 * float(gained.std(correction=0)) / math.sqrt(len(gained))
    points = float(gained.mean())
    return Difference(100 * points, 100 * (points - margin), 100 * (points + margin))
