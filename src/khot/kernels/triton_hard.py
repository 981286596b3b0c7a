# pyright: reportAttributeAccessIssue=false
"""The hard mask as a Triton kernel, one program per row, and beside the soft one in one visit of the row.

The k-th largest is found by halving the interval of ranks among all float32 numbers: 32 counts, whatever the scores.
"""

import triton
import triton.language as tl

from khot.kernels.triton_rows import rank, solve

TOP = tl.constexpr(2139095040)  # the rank of +inf; that of -inf is its negative


@triton.jit
def count_above(x, n, place, BLOCK: tl.constexpr):
    """How many scores have a rank above ``place``."""
    count = tl.zeros((), tl.int64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32)
        count += tl.sum(((rank(value) > place) & (at < n)).to(tl.int64))
    return count


@triton.jit
def kth_rank(x, n, k, BLOCK: tl.constexpr):
    """The rank of the k-th largest; that of +inf for ``k = 0``."""
    low = tl.zeros((), tl.int64) - TOP - 1
    high = tl.zeros((), tl.int64) + TOP
    for _ in range(33):
        mid = (low + high) >> 1
        enough = count_above(x, n, mid, BLOCK) >= k
        open_ = high - low > 1
        low = tl.where(open_ & enough, mid, low)
        high = tl.where(open_ & ~enough, mid, high)
    return high


@triton.jit
def write_hard(x, out, k, n, BLOCK: tl.constexpr):
    """1 for the k largest of one row, ties to the earlier index, 0 for -inf; a nan makes the row nan."""
    cut = kth_rank(x, n, k, BLOCK)
    room = k - count_above(x, n, cut, BLOCK)
    seen = tl.zeros((), tl.int64)
    lost = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        lost += tl.sum((value != value).to(tl.int32))
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32)
        place = rank(value)
        level = ((place == cut) & (at < n)).to(tl.int64)
        chosen = (place > cut) | ((level > 0) & (seen + tl.cumsum(level) <= room))
        seen += tl.sum(level)
        mask = tl.where(chosen & (value > float("-inf")), 1.0, 0.0)
        mask = tl.where(lost > 0, float("nan"), mask)
        tl.store(out + at, mask.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def hard(x, out, k_values, k_stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    write_hard(x + row * n, out + row * n, tl.load(k_values + row * k_stride), n, BLOCK)


@triton.jit
def both(x, soft, out, k_values, k_stride, whole_values, tau_values, tau_stride, t_out, n, FAMILY: tl.constexpr, BLOCK: tl.constexpr):
    """The soft mask, which the gradient wants, and the hard one: the row is read from memory once."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(k_values + row * k_stride)
    tau = tl.load(tau_values + row * tau_stride)
    tl.store(t_out + row, solve(x + row * n, soft + row * n, k, tau, n, FAMILY, BLOCK))
    write_hard(x + row * n, out + row * n, tl.load(whole_values + row * k_stride), n, BLOCK)
