"""Which options of a sparse autoencoder fit together."""

from __future__ import annotations

import math

from khot.nn.annealing import Method, check_count, check_method
from khot.nn.learned_k import LearnedK


def check(
    d_in: int, d_sae: int, k: int | LearnedK, select: str, method: Method | None, design: str | None, passes: int, start: float
) -> int | LearnedK:
    if select not in ("topk", "batch_topk"):
        raise ValueError(f"select must be 'topk' or 'batch_topk', got {select!r}")
    if isinstance(k, LearnedK):
        if k.dim != d_in or k.high > d_sae or select != "topk":
            raise ValueError(f"a learned k needs select='topk', dim={d_in} and high <= {d_sae}, got {select!r}, {k.dim} and {k.high:g}")
    else:
        k = check_count(k, "k", d_sae, "d_sae")
    if method is not None:
        check_method(method, design)
    elif design is not None:
        raise ValueError("a design draws from the mask of a method; name one, e.g. method='sigmoid'")
    check_count(passes, "passes")
    if not 1 <= start < math.inf:
        raise ValueError(f"start must be at least 1 and finite, got {start}")
    return k
