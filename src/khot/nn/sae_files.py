"""Sparse autoencoders on disk, in the layout of SAELens: ``cfg.json`` and ``sae_weights.safetensors``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from khot.nn.learned_k import LearnedK
from khot.nn.sparse_autoencoder import SparseAutoencoder

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
OWN = ("select", "method", "design", "signed", "passes", "start", "aux", "dead_after")  # options that only khot knows
NAMES = ("W_enc", "b_enc", "W_dec", "b_dec")


def save(sae: SparseAutoencoder, folder: Path, format: str) -> None:
    if format not in ("sae_lens", "khot"):
        raise ValueError(f"format must be 'sae_lens' or 'khot', got {format!r}")
    config, tensors = _for_sae_lens(sae) if format == "sae_lens" else _for_khot(sae)
    folder.mkdir(parents=True, exist_ok=True)
    _safetensors().save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path) -> SparseAutoencoder:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} must hold {CONFIG} and {WEIGHTS}; {name} is missing")
    config, tensors = _read(folder)
    sae = _build(config, tensors, folder)
    missing = set(sae.state_dict()) ^ set(tensors)
    if missing:
        raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {', '.join(sorted(missing))} is in one of them only")
    for name, tensor in sae.state_dict().items():
        if tensor.shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, which the other file wants to be {tuple(tensor.shape)}"
            raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {name} has shape {shapes}")
    sae.to(tensors["W_enc"].dtype).load_state_dict(tensors)
    return sae


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Both files, or an error that names the one that is broken."""
    library = _safetensors()
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is not JSON: {error}") from error
    try:
        tensors = library.load_file(folder / WEIGHTS)
    except Exception as error:  # whatever that library raises
        raise ValueError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    kind = config.get("architecture") if isinstance(config, dict) else None
    wanted = ["d_in", "d_sae", *(["k"] if kind == "topk" else ["k", "tau", "until", *OWN] if kind == "khot" else [])]
    gone = [name for name in wanted if not isinstance(config, dict) or name not in config]
    if gone:
        raise ValueError(f"{folder / CONFIG} must be an object with {', '.join(wanted)}; it has no {', '.join(gone)}")
    if gone := [name for name in NAMES if name not in tensors]:
        raise ValueError(f"{folder / WEIGHTS} must hold {', '.join(NAMES)}; {', '.join(gone)} is missing")
    return config, tensors


def _for_sae_lens(sae: SparseAutoencoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if isinstance(sae.k, LearnedK) or sae.signed or sae.passes > 1:
        raise ValueError("SAELens knows no learned k, no signed latents and no second pass; save with format='khot'")
    tensors = _plain(sae)
    config = _shape(sae) | {"apply_b_dec_to_input": True, "normalize_activations": "none", "reshape_activations": "none", "metadata": {}}
    if sae.select == "topk":
        return config | {"architecture": "topk", "k": sae.k}, tensors
    if bool(sae.threshold.isnan()):
        raise ValueError("batch_topk has no threshold before it was trained; train it, or save with format='khot'")
    # At inference every latent above the threshold is kept: a JumpReLU whose thresholds are equal.
    return config | {"architecture": "jumprelu"}, tensors | {"threshold": sae.threshold.expand(sae.d_sae)}


def _for_khot(sae: SparseAutoencoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if sae.method is not None and not isinstance(sae.method, str):
        raise ValueError("a method that is a function cannot be written to a file; use the name of a relaxation")
    k = sae.k
    number = {"mean": k.mean, "low": k.low, "high": k.high} if isinstance(k, LearnedK) else k
    config = _shape(sae) | {"architecture": "khot", "k": number, "tau": sae.ends, "until": sae.until}
    return config | {name: getattr(sae, name) for name in OWN}, sae.state_dict() | {"W_dec": sae.decoder}


def _shape(sae: SparseAutoencoder) -> dict[str, Any]:
    return {"d_in": sae.d_in, "d_sae": sae.d_sae, "dtype": str(sae.W_enc.dtype).removeprefix("torch."), "device": "cpu"}


def _plain(sae: SparseAutoencoder) -> dict[str, Tensor]:
    return {name: getattr(sae, name) for name in NAMES} | {"W_dec": sae.decoder}


def _build(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> SparseAutoencoder:
    """The module that a file asks for; tensors are changed to its own form."""
    kind, d_in, d_sae = config.get("architecture"), config["d_in"], config["d_sae"]
    if kind == "khot":
        k = config["k"]
        k = LearnedK(d_in, **k) if isinstance(k, dict) else k
        options = {name: config[name] for name in OWN}
        return SparseAutoencoder(d_in, d_sae, k, tau=tuple(config["tau"]), until=config["until"], **cast(Any, options))
    _check_plain(config, folder)
    norms = tensors["W_dec"].norm(dim=-1)
    if kind == "topk":
        _fold(tensors, norms, "topk")
        return SparseAutoencoder(d_in, d_sae, config["k"])
    if kind == "jumprelu":
        _fold(tensors, norms, "jumprelu")
        tensors["threshold"] = _one(tensors["threshold"], folder)
        return SparseAutoencoder(d_in, d_sae, min(d_sae, config.get("k", 1)), select="batch_topk")
    raise ValueError(f"{folder / CONFIG} has architecture {kind!r}; khot reads 'topk', 'jumprelu' and its own 'khot'")


def _check_plain(config: dict[str, Any], folder: Path) -> None:
    """Settings that would change the function must have their plain values."""
    wanted = {"apply_b_dec_to_input": True, "normalize_activations": "none", "reshape_activations": "none"}
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ValueError(f"{folder / CONFIG} has {name}={config[name]!r}; khot reads {value!r} only")
    if config.get("rescale_acts_by_decoder_norm"):
        raise ValueError(f"{folder / CONFIG} has rescale_acts_by_decoder_norm=True; fold the norms first")


def _fold(tensors: dict[str, Tensor], norms: Tensor, kind: str) -> None:
    """khot's decoder has rows of length 1, and moving their lengths into the encoder would change which latents are largest."""
    if not torch.allclose(norms, torch.ones_like(norms), atol=1e-3):
        span = f"from {norms.min().item():.3g} to {norms.max().item():.3g}"
        raise ValueError(f"the rows of W_dec of this {kind!r} autoencoder have norms {span}; khot's must be 1, normalise them first")


def _one(threshold: Tensor, folder: Path) -> Tensor:
    if not bool((threshold == threshold[0]).all()):
        raise ValueError(f"{folder / WEIGHTS} has a threshold for each latent; khot's batch_topk has one for all")
    return threshold[0].clone()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files of sparse autoencoders need safetensors: pip install safetensors") from error
    return safetensors.torch
