# pyright: reportAttributeAccessIssue=false
"""The Triton kernels themselves, one program per row.

A row's threshold is searched like in the reference: Newton steps kept inside a bracket bring ``t``, a float32 number, within reach;
then ``s`` is polished in ``u = (x - t) / tau + s``, where ``x - t`` is exact. Sums go into float64.
"""

import triton
import triton.language as tl

SIGMOID, EUCLIDEAN, LAPLACE, GAUSSIAN = (tl.constexpr(i) for i in range(4))
LARGE = tl.constexpr(3.4028234e38)
ROUNDS = tl.constexpr(100)


@triton.jit
def normal_tail(a):
    """Phi(-a) for a >= 0, by a polynomial in (a - 4) / (a + 4) times exp(-a^2 / 2)."""
    s = (a - 4) / (a + 4)
    p = s * -0.000125558385602256097 + 0.000188996519420263973
    p = p * s + 0.00156688168778090475
    p = p * s - 0.00352097282398637407
    p = p * s - 0.00752540241820854468
    p = p * s + 0.0604061855142917908
    p = p * s - 0.186523306757767822
    p = p * s + 0.38713668307040542
    p = p * s - 0.607896594145081739
    p = p * s + 0.755285138596192936
    return tl.exp(-0.5 * a * a) * p / (a + 4)


@triton.jit
def squash(u, FAMILY: tl.constexpr):
    """F(u) and F'(u)."""
    if FAMILY == SIGMOID:
        e = tl.exp(-tl.abs(u))
        small = e / (1 + e)
        y = tl.where(u < 0, small, 1 / (1 + e))
        return y, small / (1 + e)
    if FAMILY == EUCLIDEAN:
        y = tl.minimum(tl.maximum(u + 0.5, 0.0), 1.0)
        return y, tl.where((y > 0) & (y < 1), 1.0, 0.0)
    if FAMILY == LAPLACE:
        tail = 0.5 * tl.exp(-tl.abs(u))
        return tl.where(u < 0, tail, 1 - tail), tail
    a = tl.minimum(tl.abs(u), 40.0)
    tail = normal_tail(a)
    return tl.where(u < 0, tail, 1 - tail), 0.3989422804014327 * tl.exp(-0.5 * a * a)


@triton.jit
def slope_of(y, FAMILY: tl.constexpr):
    """F' as a function of y = F(u)."""
    if FAMILY == SIGMOID:
        return y * (1 - y)
    if FAMILY == EUCLIDEAN:
        return tl.where((y > 0) & (y < 1), 1.0, 0.0)
    tail = tl.minimum(y, 1 - y)
    if FAMILY == LAPLACE:
        return tail
    s = tl.sqrt(-2 * tl.log(tl.maximum(tail, 1e-37)))  # phi(Phi^-1(p)) = p r(s)
    z = (s - 2) / (s + 2)
    p = z * -0.00327962184616378351 + 0.00590735072109046674
    p = p * z - 0.0120953572826317988
    p = p * z + 0.0136722415561611483
    p = p * z - 0.0104602820822408552
    p = p * z + 0.0490593286082034809
    p = p * z - 0.261024084436346742
    p = p * z + 0.415016145211281212
    p = p * z + 0.803515782297573419
    return tail * s * p


@triton.jit
def evaluate(x, n, t, s, inv_tau, FAMILY: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of F and of its slope over the row."""
    total = tl.zeros((), tl.float64)
    slope = tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32)
        y, v = squash((value - t) * inv_tau + s, FAMILY)
        total += tl.sum(y.to(tl.float64))
        slope += tl.sum(tl.where(at < n, v, 0.0).to(tl.float64))
    return total, slope


@triton.jit
def rank(value):
    """The position of a float32 among all of them, and back: its own inverse on the bits."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -2147483648 - bits, bits).to(tl.int64)


@triton.jit
def middle(low, high):
    """Half-way in the order of floating-point numbers."""
    half = ((rank(low) + rank(high)) >> 1).to(tl.int32)
    return tl.where(half < 0, -2147483648 - half, half).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def look(x, n, BLOCK: tl.constexpr):
    """The range of the finite scores; how many are +inf, above -inf, nan."""
    lowest = tl.full((), LARGE, tl.float32)
    highest = tl.full((), -LARGE, tl.float32)
    certain = tl.zeros((), tl.float64)
    present = tl.zeros((), tl.float64)
    lost = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32)
        finite = tl.abs(value) <= LARGE
        lowest = tl.minimum(lowest, tl.min(tl.where(finite, value, LARGE)))
        highest = tl.maximum(highest, tl.max(tl.where(finite, value, -LARGE)))
        certain += tl.sum((value == float("inf")).to(tl.float64))
        present += tl.sum((value > float("-inf")).to(tl.float64))
        lost += tl.sum((value != value).to(tl.int32))
    return lowest, highest, certain, present, lost


@triton.jit
def reach_of(k, tau, certain, present):
    """How far beyond the finite scores the threshold may lie: what F^-1 would give, widened to what holds for all four families."""
    share = tl.maximum((k - certain) / tl.maximum(present - certain, 1.0), 1e-30)
    return (tau * tl.maximum(-tl.log(tl.minimum(share, 0.5)), -tl.log(tl.maximum(1 - tl.maximum(share, 0.5), 1e-30)))).to(tl.float32)


@triton.jit
def approach(x, n, k, tau, lowest, highest, reach, solvable, FAMILY: tl.constexpr, BLOCK: tl.constexpr):
    """A float32 ``t`` near the threshold, and the step in ``u`` that is left."""
    inv_tau = (1 / tau).to(tl.float32)
    low = tl.maximum(lowest - reach - tl.abs(lowest) * 1e-6, -LARGE)
    high = tl.minimum(highest + reach + tl.abs(highest) * 1e-6, LARGE)
    t = lowest + 0.5 * (highest - lowest)
    step = tl.zeros((), tl.float32)
    slope_low = tl.zeros((), tl.float64)
    slope_high = tl.zeros((), tl.float64)
    near = ~solvable
    i = 0
    while (i < ROUNDS) & (~near):
        total, slope = evaluate(x, n, t, 0.0, inv_tau, FAMILY, BLOCK)
        excess = total - k
        low = tl.where(excess > 0, t, low)
        high = tl.where(excess > 0, high, t)
        slope_low = tl.where(excess > 0, slope, slope_low)
        slope_high = tl.where(excess > 0, slope_high, slope)
        newton = (excess / tl.maximum(slope, 1e-300)).to(tl.float32)
        settled = tl.abs(excess) <= 1e-7 * tl.minimum(k, 1.0)
        near = (tl.abs(newton) <= 1) | settled
        step = tl.where(near & ~settled, -newton, 0.0)
        leap = t + newton * tau.to(tl.float32)
        mid = middle(low, high)
        closed = ((mid <= low) | (mid >= high)) & ~near
        inside = (leap > low) & (leap < high) & ((i < 4) | (i % 2 == 1))
        # Of two neighbouring numbers, the one with the steeper sum sits on data.
        end = tl.where(slope_low > slope_high, low, high)
        t = tl.where(near, t, tl.where(closed, end, tl.where(inside, leap, mid)))
        near = near | closed
        i += 1
    return t, step


@triton.jit
def polish(x, n, k, t, step, inv_tau, solvable, FAMILY: tl.constexpr, BLOCK: tl.constexpr):
    """The ``s`` of ``u = (x - t) / tau + s``, and a last step in the values themselves, which spreads what rounding leaves of the sum."""
    s, s_low, s_high = step, tl.full((), -800.0, tl.float32), tl.full((), 800.0, tl.float32)
    done = ~solvable
    i = 0
    while (i < 40) & (~done):
        total, slope = evaluate(x, n, t, s, inv_tau, FAMILY, BLOCK)
        excess = total - k
        s_high = tl.where(excess > 0, s, s_high)
        s_low = tl.where(excess > 0, s_low, s)
        newton = s - (excess / tl.maximum(slope, 1e-300)).to(tl.float32)
        inside = (newton >= s_low) & (newton <= s_high) & ((i < 6) | (i % 2 == 1))
        done = (tl.abs(newton - s) <= 1e-7 * tl.maximum(tl.abs(s), 1e-3)) | (tl.abs(excess) <= 1e-7 * tl.minimum(k, 1.0))
        s = tl.where(done, s, tl.where(inside, newton, 0.5 * (s_low + s_high)))
        i += 1
    total, slope = evaluate(x, n, t, s, inv_tau, FAMILY, BLOCK)
    rest = tl.where(slope > 0, (k - total) / tl.maximum(slope, 1e-300), 0.0)
    return s, tl.where(tl.abs(rest) < 1e-3, rest, 0.0).to(tl.float32)


@triton.jit
def solve(x, y, k, tau, n, FAMILY: tl.constexpr, BLOCK: tl.constexpr):
    """Write the mask of one row; return its threshold."""
    inv_tau = (1 / tau).to(tl.float32)
    lowest, highest, certain, present, lost = look(x, n, BLOCK)
    solvable = (k > certain) & (k < present) & (lost == 0) & (tau > 0)
    t, step = approach(x, n, k, tau, lowest, highest, reach_of(k, tau, certain, present), solvable, FAMILY, BLOCK)
    s, rest = polish(x, n, k, t, step, inv_tau, solvable, FAMILY, BLOCK)
    shared = tl.where(certain > 0, tl.minimum(k / tl.maximum(certain, 1.0), 1.0), 1.0).to(tl.float32)
    flat = tl.where(k >= present, 1.0, 0.0)
    lost_row = (lost > 0) | (k != k) | ~(tau > 0)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        mask, v = squash((value - t) * inv_tau + s, FAMILY)
        mask = tl.minimum(tl.maximum(mask + v * rest, 0.0), 1.0)
        mask = tl.where(solvable, mask, flat)
        mask = tl.where(value == float("inf"), shared, tl.where(value == float("-inf"), 0.0, mask))
        mask = tl.where(lost_row, float("nan"), mask)
        tl.store(y + at, mask.to(y.dtype.element_ty), mask=at < n)
    return tl.where(solvable, t.to(tl.float64) - (s + rest).to(tl.float64) * tau, 0.0)


@triton.jit
def forward(x, y, k_values, k_stride, tau_values, tau_stride, t_out, n, FAMILY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(k_values + row * k_stride)
    tau = tl.load(tau_values + row * tau_stride)
    tl.store(t_out + row, solve(x + row * n, y + row * n, k, tau, n, FAMILY, BLOCK))


@triton.jit
def backward(y, g, x, shift, gx, gk, gtau, tau_values, tau_stride, n, LEARNS_TAU: tl.constexpr, FAMILY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    y += row * n
    g += row * n
    x += row * n
    gx += row * n
    tau = tl.load(tau_values + row * tau_stride)
    inv_tau = (1 / tau).to(tl.float32)
    total = tl.zeros((), tl.float64)
    weighted = tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = slope_of(tl.load(y + at, mask=at < n, other=0.0).to(tl.float32), FAMILY)
        total += tl.sum(v.to(tl.float64))
        weighted += tl.sum((v * tl.load(g + at, mask=at < n, other=0.0).to(tl.float32)).to(tl.float64))
    mean = tl.where(total == 0, 0.0, weighted / tl.where(total == 0, 1.0, total))
    t = tl.load(shift + row)
    near = t.to(tl.float32)
    rest = ((near.to(tl.float64) - t) / tau).to(tl.float32)
    by_tau = tl.zeros((), tl.float64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = slope_of(tl.load(y + at, mask=at < n, other=0.0).to(tl.float32), FAMILY)
        value = v * inv_tau * (tl.load(g + at, mask=at < n, other=0.0).to(tl.float32) - mean.to(tl.float32))
        tl.store(gx + at, value.to(gx.dtype.element_ty), mask=at < n)
        if LEARNS_TAU:
            score = tl.load(x + at, mask=at < n, other=float("-inf")).to(tl.float32)
            u = (score - near) * inv_tau + rest
            by_tau += tl.sum(tl.where((tl.abs(score) <= LARGE) & (v != 0), value * u, 0.0).to(tl.float64))
    tl.store(gk + row, mean)
    tl.store(gtau + row, -by_tau)
