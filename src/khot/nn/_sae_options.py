"""Which options of a sparse autoencoder fit together."""

from __future__ import annotations

from khot.nn.annealing import Method, check_method
from khot.nn.learned_k import LearnedK


def check(
    d_in: int, d_sae: int, k: int | LearnedK, select: str, method: Method | None, design: str | None, passes: int, start: float
) -> None:
    if select not in ("topk", "batch_topk"):
        raise ValueError(f"select must be 'topk' or 'batch_topk', got {select!r}")
    if isinstance(k, LearnedK):
        if k.dim != d_in or k.high > d_sae or select != "topk":
            raise ValueError(f"a learned k needs select='topk', dim={d_in} and high <= {d_sae}, got {select!r}, {k.dim} and {k.high:g}")
    elif not 0 < k <= d_sae:
        raise ValueError(f"k must be between 1 and d_sae={d_sae}, got {k}")
    if method is not None:
        check_method(method, design)
    elif design is not None:
        raise ValueError("a design draws from the mask of a method; name one, e.g. method='sigmoid'")
    if passes < 1 or start < 1:
        raise ValueError(f"passes and start must be at least 1, got {passes} and {start}")
