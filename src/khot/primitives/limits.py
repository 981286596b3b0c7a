"""How much memory a method may ask for, said before it is asked for."""

from __future__ import annotations

import math

from khot._tensors import Number

LIMIT = 1 << 31  # entries: 8 GiB in float32


def check_size(method: str, *shape: Number, what: str = "matrix", fix: str = "select fewer items at a time or split the batch") -> None:
    """Raise if an array of this shape is more than a method should build.

    Args:
        method: who asks.
        shape: of the array that would be built.
        what: what the array is.
        fix: what to do instead.

    Example:
        >>> check_size("neuralsort", 16, 100, 1000)
    """
    size = math.prod(shape)
    if size > LIMIT:
        sides = " x ".join(str(side) for side in shape)
        raise ValueError(f"method {method!r} would build a {sides} {what} ({size:.3g} entries, the limit is {LIMIT:.3g}); {fix}")
