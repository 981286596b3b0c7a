"""The training loop: ignite's engine around one step whose randomness depends on (seed, step) alone, so that a resumed run is the run."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from khot.models import count_macs, count_parameters, off_diagonal_shares
from khot.models.select import Selection
from khot.train import checkpoint, records
from khot.train.batches import Batch, Batches, StepSampler, mix
from khot.train.config import TrainConfig, differences, from_json
from khot.train.evaluate import build, evaluate, image_size, on_device, set_schedule
from khot.train.log import Bar, Log, progress_bar
from khot.train.sources import load

AMP = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Run:
    """Everything a run consists of; :func:`train` drives it."""

    def __init__(self, config: TrainConfig) -> None:
        import ignite.distributed as idist

        self.started, self.earlier = time.process_time(), 0.0
        self.config, self.rank, self.world, self.sum = config, idist.get_rank(), idist.get_world_size(), idist.all_reduce
        if config.batch_size % (config.accumulate * self.world):
            raise ValueError(
                f"batch_size={config.batch_size} must be a multiple of accumulate x processes = {config.accumulate * self.world}"
            )
        self.source, self.test = load(config.data, config.data_dir, size=image_size(config))
        self.subset, self.held_out = split(len(self.source.labels), config.validation)
        torch.manual_seed(config.seed)
        self.model = on_device(build(config, self.source.num_classes), config.device)
        self.wrapped = nn.parallel.DistributedDataParallel(self.model) if self.world > 1 else self.model
        self.optimizer = torch.optim.AdamW(decay_groups(self.model, config.weight_decay), lr=config.lr)
        self.scaler = torch.amp.GradScaler(config.device, enabled=config.amp == "float16")
        self.average = _average(self.model, config.ema) if config.ema else None
        self.per_epoch = len(StepSampler(self.subset, config.batch_size, 1, seed=config.seed))
        self.total, self.step, self.loss = self.per_epoch * config.epochs, 0, math.nan
        self._resume()

    @property
    def tested(self) -> nn.Module:
        """What is evaluated and kept: the running mean of the weights where there is one."""
        return self.model if self.average is None else self.average.module

    @property
    def cpu_seconds(self) -> float:
        """CPU time of this process for everything: data, steps, validation, and what came before the checkpoint."""
        return self.earlier + time.process_time() - self.started

    def loader(self) -> DataLoader[Batch]:
        c = self.config
        sampler = StepSampler(self.subset, c.batch_size, c.epochs, seed=c.seed, start=self.step, rank=self.rank, world=self.world)
        data = Batches(self.source, seed=c.seed, flip=c.flip, pad=c.pad, erase=c.erase)
        return DataLoader(data, batch_size=None, sampler=sampler, num_workers=c.workers)

    def set_schedules(self) -> dict[str, float]:
        """Learning rate, temperature and keep rate of this step."""
        progress = self.step / max(1, self.total - 1)
        rates = {"lr": self.config.learning_rate(self.step, self.total, self.per_epoch)}
        rates |= {"tau": self.config.tau_at(progress), "keep": self.config.keep_at(progress)}
        for group in self.optimizer.param_groups:
            group["lr"] = rates["lr"]
        for model in {self.model, self.tested}:
            set_schedule(model, rates["tau"], rates["keep"])
        return rates

    def train_step(self, engine: Any, batch: Batch) -> float:
        """One step of the optimiser on one global batch."""
        self.set_schedules()
        self.model.train()
        torch.manual_seed((self.config.seed * 1_000_003 + self.step) * self.world + self.rank)
        targets = F.one_hot(batch.labels, self.source.num_classes).float()
        images, targets = mix(batch.images, targets, self.config.mixup, self.config.cutmix)
        loss = self._backward(images.to(self.config.device), targets.to(self.config.device))
        self.loss = float(self.sum(loss)) / self.world  # of the global batch, so that all processes stop where one must
        if not math.isfinite(self.loss):
            raise FloatingPointError(
                f"the loss is {self.loss} at step {self.step}, on the images {batch.indices.tolist()}; nothing was saved"
            )
        self._update()
        self.step += 1
        return self.loss

    def _backward(self, images: Tensor, targets: Tensor) -> float:
        self.optimizer.zero_grad()
        parts = list(zip(images.chunk(self.config.accumulate), targets.chunk(self.config.accumulate), strict=True))
        total = torch.zeros((), device=images.device)
        for i, (some, wanted) in enumerate(parts):
            last = i == len(parts) - 1
            hold = (
                contextlib.nullcontext()
                if last or not isinstance(self.wrapped, nn.parallel.DistributedDataParallel)
                else self.wrapped.no_sync()
            )
            with hold, torch.autocast(images.device.type, AMP[self.config.amp], enabled=self.config.amp != "none"):
                loss = F.cross_entropy(self.wrapped(some), wanted, label_smoothing=self.config.label_smoothing) * len(some) / len(images)
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return float(total)

    def _update(self) -> None:
        if self.config.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average is not None:
            self.average.update_parameters(self.model)

    @property
    def checkpoint_path(self) -> Path:
        return self.config.out / "checkpoint.pt"

    def save(self) -> None:
        if self.rank:
            return
        state = {"step": self.step, "cpu_seconds": self.cpu_seconds, "config": self.config.to_json()}
        state |= {name: part.state_dict() for name, part in self._parts().items()}
        checkpoint.save(self.checkpoint_path, state)

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return parts if self.average is None else parts | {"average": self.average}

    def _resume(self) -> None:
        if not self.checkpoint_path.exists():
            return
        state = checkpoint.load(self.checkpoint_path, {"step", "cpu_seconds", "config", *self._parts()})
        changed = differences(from_json(state["config"]), self.config)
        if changed:
            raise ValueError(f"{self.checkpoint_path} is of another run ({'; '.join(changed)}); choose another --out or the same settings")
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.step, self.earlier = state["step"], state["cpu_seconds"]

    def validate(self) -> float:
        if not len(self.held_out):
            return math.nan
        return evaluate(self.tested, self.source, self.held_out, device=self.config.device).top1


def train(config: TrainConfig) -> records.Record:
    """Run ``config`` to its end, from its checkpoint if there is one; returns the record.

    A finished run is not run again: its record is read from ``record.json``.
    """
    done = config.out / "record.json"
    if done.exists():
        return _finished(done, config)
    with _processes(config.device):
        run = Run(config)
        config.out.mkdir(parents=True, exist_ok=True)
        if run.step < run.total:
            drive(run)
        return _finish(run, done)


def _finished(done: Path, config: TrainConfig) -> records.Record:
    """The record of a run that came to its end, if it is this one."""
    try:
        record = json.loads(done.read_text())
        changed = differences(from_json(json.dumps(record["config"])), config)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{done} is no record of a run ({error}); move it away to run again") from error
    if changed:
        raise ValueError(f"{done} is of another run ({'; '.join(changed)}); choose another --out or the same settings")
    return record


def drive(run: Run) -> None:
    """All steps that are left, with log and checkpoints."""
    from ignite.engine import Engine, Events

    config, trainer = run.config, Engine(run.train_step)
    trainer.logger.setLevel(logging.CRITICAL)  # an error is raised; it need not be logged as well
    log = Log(config.out, start=run.step, tensorboard=config.tensorboard) if not run.rank else None
    trainer.load_state_dict({"iteration": run.step, "max_epochs": config.epochs, "epoch_length": run.per_epoch})
    with progress_bar(run.total, run.step, enabled=config.progress and not run.rank) as bar:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=config.log_every), lambda: _note(run, log, bar))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=config.save_every), run.save)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: _note(run, log, bar, validation=run.validate()))
        trainer.run(run.loader(), max_epochs=config.epochs, epoch_length=run.per_epoch)
    run.save()


def _note(run: Run, log: Log | None, bar: Bar, **more: float) -> None:
    if log is None:
        return
    values = {
        name: f"{value:.6g}" for name, value in (run.set_schedules() | {"loss": run.loss, "cpu_seconds": run.cpu_seconds} | more).items()
    }
    log.write(step=run.step, epoch=(run.step - 1) // run.per_epoch, **values)
    bar.show(run.step, f"{run.config.model} loss {run.loss:.3f}" + "".join(f" {name} {value:.2f}" for name, value in more.items()))


def _finish(run: Run, done: Path) -> records.Record:
    """Test once, keep the weights, write the record."""
    config = run.config
    set_schedule(run.tested, config.tau[1], config.keep[1])
    score = evaluate(run.tested, run.test, torch.arange(len(run.test.labels)), device=config.device)
    validation = run.validate()
    images = Batches(run.test, seed=0, augment=False)[0, torch.arange(min(64, len(run.test.labels)))].images
    shares = _shares(run.tested, images.to(config.device))
    record = {
        "model": config.model,
        "data": config.data,
        "seed": config.seed,
        "top1": score.top1,
        "top5": score.top5,
        "validation": validation,
        "parameters": count_parameters(run.model),
        "macs": count_macs(run.tested, 1, *images.shape[1:]),
        "images_per_second": score.images_per_second,
        "cpu_minutes": run.cpu_seconds / 60,
        "processes": run.world,
        "off_diagonal": shares,
        "correct": records.pack(score.correct),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "config": json.loads(config.to_json()),
        **records.circumstances(),
    }
    if not run.rank:
        metadata = {"config": config.to_json(), "num_classes": str(run.source.num_classes)}
        checkpoint.save_weights(config.out / "model.safetensors", run.tested, metadata)
        records.append(config.records or config.out / "records.jsonl", record)
        checkpoint.replace_file(done, lambda part: part.write_text(json.dumps(record, sort_keys=True)))
    return record


def _shares(model: nn.Module, images: Tensor) -> list[float]:
    if not any(isinstance(module, Selection) for module in model.modules()):
        return []
    return [round(share, 4) for share in off_diagonal_shares(model, images)]


def split(n: int, held_out: int) -> tuple[Tensor, Tensor]:
    """Training and validation indices, the same for every run."""
    if not 0 <= held_out < n:
        raise ValueError(f"validation must be between 0 and the {n} training images, got {held_out}")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return order[held_out:].sort().values, order[:held_out].sort().values


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and kernels decay; biases, norms, tokens and positions do not."""
    named = list(model.named_parameters())
    plain = [value for name, value in named if value.ndim < 2 or name.endswith(("pos_embed", "_token"))]
    decayed = [value for name, value in named if not (value.ndim < 2 or name.endswith(("pos_embed", "_token")))]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def _average(model: nn.Module, decay: float) -> torch.optim.swa_utils.AveragedModel:
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay), use_buffers=True)


@contextlib.contextmanager
def _processes(device: str) -> Any:
    """Join the other processes if torchrun started this one."""
    import ignite.distributed as idist

    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if together:
        idist.initialize("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield
    finally:
        if together:
            idist.finalize()
