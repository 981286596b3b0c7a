"""What the page shows, computed by khot itself: numbers for one method or design, and the code that makes the same call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from khot.explore.question import DRAWS, MAX_ITEMS, MAX_SCORE, TAUS, Question
from khot.hard import topk_mask
from khot.registry import DESIGNS, RELAXATIONS, Design, Relaxation
from khot.sampling import sample_topk
from khot.soft import soft_topk, soft_topk_matrix


def table() -> dict[str, Any]:
    """The rows of the registry and the limits of the page."""
    limits = {"items": MAX_ITEMS, "score": MAX_SCORE, "tau": TAUS, "draws": DRAWS}
    methods = [_method(row) for _, row in sorted(RELAXATIONS.items())]
    return {"methods": methods, "designs": [_design(row) for _, row in sorted(DESIGNS.items())], "limits": limits}


def _method(row: Relaxation) -> dict[str, Any]:
    return {
        "name": row.name,
        "matrix": row.matrix is not None,
        "fractional": row.grad_k,
        "probabilities": _gives_probabilities(row),
        "words": [word for word, holds in (("smooth", row.smooth), ("sparse", row.sparse), ("random", not row.deterministic)) if holds],
        "cost": row.cost,
        "paper": row.paper,
    }


def _gives_probabilities(row: Relaxation) -> bool:
    """Whether the page samples from it: a mask in [0, 1] that sums to k and is the same every time."""
    return row.sums_to_k and row.bounded and row.deterministic


def _design(row: Design) -> dict[str, Any]:
    words = [word for word, holds in (("exact π", row.exact), ("size k", row.fixed_size)) if holds]
    return {"name": row.name, "words": words, "cost": row.cost, "paper": row.paper, "note": row.note}


def soft(asked: Question) -> dict[str, Any]:
    """Mask, its sum, its Jacobian, and the matrix of a matrix method.

    Example:
        >>> from khot.explore.question import read
        >>> soft(read({"x": "1,4,2,3", "k": "2", "tau": "0.5", "method": "sigmoid"}))["sum"]
        2.0
    """
    mask = soft_topk(asked.scores, asked.k, asked.tau, method=asked.method.name, **_options(asked))
    hard = topk_mask(asked.scores, round(asked.k))
    out = {
        "mask": _numbers(mask, 9),
        "hard": _numbers(hard, 1),
        "sum": _numbers(mask.sum(), 9),
        "distance": _numbers((mask - hard).abs().sum(), 6),
        "jacobian": _numbers(_jacobian(asked), 5),
        "code": code_of_mask(asked),
    }
    if asked.method.matrix is not None:
        rows = soft_topk_matrix(asked.scores, int(asked.k), asked.tau, method=asked.method.name, **_options(asked))
        out["matrix"] = _numbers(rows, 5)
    return out


def sampled(asked: Question) -> dict[str, Any]:
    """How often each item was drawn in ``DRAWS`` samples, beside the probability that was asked for.

    Example:
        >>> from khot.explore.question import read
        >>> sampled(read({"x": "1,4,2,3", "k": "2", "tau": "0.5", "method": "sigmoid", "design": "pivotal"}))["sizes"]
        {'2': 100}
    """
    if asked.design is None:
        raise ValueError("design is missing; ask for example with design=systematic")
    if not _gives_probabilities(asked.method):
        fit = ", ".join(name for name, row in sorted(RELAXATIONS.items()) if _gives_probabilities(row))
        raise ValueError(f"method {asked.method.name!r} gives no fixed probabilities that sum to k; choose from {fit}")
    method, design = asked.method.name, asked.design.name
    probs = soft_topk(asked.scores, asked.k, asked.tau, method=method)
    masks = sample_topk(asked.scores, asked.k, asked.tau, method=method, design=design, num_samples=DRAWS, generator=_generator(asked))
    sizes, counts = masks.sum(-1).long().unique(return_counts=True)
    return {
        "probs": _numbers(probs, 9),
        "drawn": [int(count) for count in masks.sum(0).tolist()],
        "draws": DRAWS,
        "sizes": {str(size): count for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)},
        "code": code_of_sample(asked),
    }


def code_of_mask(asked: Question) -> str:
    """The calls behind :func:`soft`, to copy."""
    given = ", ".join(["scores", *_arguments(asked)])
    lines = [*_head(asked), f"mask = khot.soft_topk({given})"]
    if "generator" in asked.method.options:
        return "\n".join(lines)
    lines.append(f"jacobian = torch.autograd.functional.jacobian(lambda scores: khot.soft_topk({given}), scores)")
    if asked.method.matrix is not None:
        lines.append(f"rows = khot.soft_topk_matrix({given})")
    return "\n".join(lines)


def code_of_sample(asked: Question) -> str:
    """The call behind :func:`sampled`, to copy."""
    assert asked.design is not None
    given = ["scores", *_arguments(asked), f'design="{asked.design.name}"', f"num_samples={DRAWS}", f"generator={_generator_code(asked)}"]
    return "\n".join([*_head(asked), f"samples = khot.sample_topk({', '.join(given)})", "frequencies = samples.mean(0)"])


def _head(asked: Question) -> list[str]:
    return ["import torch, khot", "", f"scores = torch.tensor({asked.scores.tolist()}, dtype=torch.float64)"]


def _arguments(asked: Question) -> list[str]:
    given = [f"k={asked.k}", f"tau={asked.tau}", f'method="{asked.method.name}"']
    return [*given, f"generator={_generator_code(asked)}"] if "generator" in asked.method.options else given


def _generator_code(asked: Question) -> str:
    return f"torch.Generator().manual_seed({asked.seed})"


def _generator(asked: Question) -> Generator:
    return Generator(device="cpu").manual_seed(asked.seed)


def _options(asked: Question) -> dict[str, Any]:
    """A random method draws with the page's seed, so that an address always shows the same numbers."""
    return {"generator": _generator(asked)} if "generator" in asked.method.options else {}


def _jacobian(asked: Question) -> Tensor:
    """``(n, n)``: row i is the gradient of entry i of the mask. A batch of equal rows gives all of them in one backward pass."""
    n = asked.scores.shape[-1]
    scores = asked.scores.expand(n, n).clone().requires_grad_()
    mask = soft_topk(scores, asked.k, asked.tau, method=asked.method.name, **_options(asked))
    (slopes,) = torch.autograd.grad(mask, scores, torch.eye(n, dtype=mask.dtype, device=mask.device))
    return slopes


def _numbers(values: Tensor, digits: int) -> Any:
    """Nested lists of numbers as JSON has them: shortened, and ``None`` for what is not finite."""
    if values.ndim:
        return [_numbers(part, digits) for part in values.unbind()] if values.ndim > 1 else [_one(v, digits) for v in values.tolist()]
    return _one(values.item(), digits)


def _one(value: float, digits: int) -> float | None:
    return float(f"{value:.{digits}g}") if value - value == 0 else None
