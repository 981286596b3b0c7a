"""Files that are whole or absent, and that hold tensors only."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a neighbour, flush it to the disk, rename: a kill at any moment leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    write(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def save(path: Path, state: Mapping[str, Any]) -> None:
    replace_file(path, lambda part: torch.save(dict(state), part))


def load(path: Path, names: Iterable[str] = ()) -> dict[str, Any]:
    """A checkpoint with all of ``names`` in it, read without running any code that may be there."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, OSError) as error:
        raise ValueError(f"{path} is no whole checkpoint ({error}); move it away to start anew") from error
    missing = sorted(set(names) - (state.keys() if isinstance(state, dict) else set()))
    if missing:
        raise ValueError(f"{path} is no checkpoint of such a run (without {', '.join(missing)}); move it away to start anew")
    return state


def save_weights(path: Path, model: nn.Module, metadata: Mapping[str, str]) -> None:
    """The state dict as safetensors, with ``metadata`` in its header."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    replace_file(path, lambda part: save_file(tensors, part, dict(metadata)))


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}; `khot train` writes model.safetensors into its --out folder")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error})") from error
