"""Distance to the hard top-k and entropy against the temperature, for every relaxation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.common import Table, chosen, draw_scores, green, parser, print_tables, progress, recorder


def main(argv: list[str]) -> int:
    import khot

    options = parser("quality", __doc__)
    options.add_argument("--n", type=int, default=64)
    options.add_argument("--k", type=int, default=8)
    given = options.parse_args(argv)
    record = recorder("quality", given)
    taus = torch.logspace(-3, 2, 11 if given.quick else 26).tolist()
    scores = draw_scores("normal", (16 if given.quick else 128, given.n), torch.float64, given.seed)
    for method in progress(green(chosen(given.methods, khot.RELAXATIONS), record), "quality"):
        for tau in taus:
            torch.manual_seed(given.seed)  # for the methods that draw
            mask = khot.soft_topk(scores, given.k, tau, method=method)
            record.add(what=method, n=given.n, k=given.k, tau=tau, rows=scores.shape[0], **measures(mask, scores, given.k))
    print_tables(tables(record.rows))
    return 0


def measures(mask: Tensor, scores: Tensor, k: int) -> dict[str, float]:
    """Means over the rows.

    ``distance``: half the l1 distance to the hard mask over k, 0 for the hard mask. ``entropy``: binary entropy of the entries as a share
    of its largest value, that of the constant k/n; 0 for the hard mask. ``kept``: share of the hard top-k among the k largest entries.
    ``sum_error``: \\|sum - k\\| / k.
    """
    import khot

    hard = khot.topk_mask(scores, k)
    p = mask.clamp(0, 1)
    entropy = -(torch.special.xlogy(p, p) + torch.special.xlog1py(1 - p, -p)).sum(-1)
    share = torch.tensor(k / scores.shape[-1], dtype=mask.dtype)
    largest = -scores.shape[-1] * (share * share.log() + (1 - share) * torch.log1p(-share))
    found = {
        "distance": (mask - hard).abs().sum(-1) / (2 * k),
        "entropy": entropy / largest,
        "kept": (khot.topk_mask(mask, k) * hard).sum(-1) / k,
        "sum_error": (mask.sum(-1) - k).abs() / k,
    }
    return {name: values.mean().item() for name, values in found.items()}


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Three temperatures."""
    taus = {row["tau"] for row in rows if "tau" in row}
    shown = [min(taus, key=lambda tau: abs(tau - goal)) for goal in (0.01, 0.1, 1.0)]
    found = {(row["what"], row["tau"]): f"{row['distance']:.3f} / {row['entropy']:.3f}" for row in rows if "tau" in row}
    lines = [[method, *(found[method, tau] for tau in shown)] for method in dict.fromkeys(what for what, _ in found)]
    return [Table("distance to the hard top-k / entropy", ["", *(f"tau = {tau:g}" for tau in shown)], lines)]
