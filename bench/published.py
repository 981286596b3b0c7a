"""Published figures of successive halving and of the iterative baseline.

Source: Pietruszka, Borchmann, Gralinski, "Successive Halving Top-k Operator" (AAAI 2021, student abstract; arXiv 2010.15552) and the
code that goes with it. Only a 6 x 6 grid out of its 85 cells is at hand, and the mean over all 85.
"""

from __future__ import annotations

_COUNTS = (2, 8, 32, 128, 512, 2048)
_NCCS = {  # n -> for each k: halving, iterative
    16: ((0.968, 0.374), (0.980, 0.400)),
    64: ((0.943, 0.182), (0.976, 0.217), (0.983, 0.265)),
    256: ((0.805, 0.093), (0.950, 0.103), (0.979, 0.137), (0.985, 0.206)),
    1024: ((0.556, 0.045), (0.844, 0.059), (0.953, 0.071), (0.982, 0.102), (0.986, 0.178)),
    4096: ((0.323, 0.032), (0.556, 0.031), (0.847, 0.034), (0.955, 0.051), (0.982, 0.089), (0.986, 0.168)),
    16384: ((0.195, 0.020), (0.350, 0.020), (0.566, 0.018), (0.849, 0.025), (0.955, 0.044), (0.982, 0.082)),
}

NCCS: dict[str, dict[tuple[int, int], float]] = {
    method: {(n, k): pair[side] for n, pairs in _NCCS.items() for k, pair in zip(_COUNTS, pairs, strict=False)}
    for side, method in enumerate(("halving", "iterative"))
}
"""method -> (n, k) -> nCCS."""

MEAN = {"halving": 0.840, "iterative": 0.108}
"""The mean over all 85 cells."""

SECONDS = {  # a batch of 16 on an A100, with a Python loop over the batch
    "halving": {(16384, 2): 0.145, (16384, 128): 0.083, (16384, 2048): 0.0387},
    "iterative": {(16384, 2): 0.0036, (16384, 128): 0.185, (16384, 2048): 2.837},
}
"""method -> (n, k) -> seconds a batch."""
