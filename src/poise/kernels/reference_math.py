"""The arithmetic of numerics version 1 in numpy: what a processor with FTZ, DAZ and fused multiply-add computes.

Owns rounding, elementary functions, row reductions and activation quantisation; knows neither weights nor models.
Every function takes and returns float32 arrays; a denormal input counts as zero and no denormal is ever returned.
Rounding goes through float64: exact for products, and free of double-rounding errors for + − × / √ (53 ≥ 2·24 + 2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Operand = F32 | np.float32
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

MIN_NORMAL = 2.0**-126
# x86 judges tininess after rounding: below this a result rounds (to 24 bits, any exponent) under 2^-126.
FLUSH_BELOW = 2.0**-126 - 2.0**-151
DROPPED_BITS = 0x1FFFFFFF  # of a float64 when it becomes a float32
HALFWAY = 0x10000000
LANES = 16
CUT = 4096
GROUP = 32  # activations that share a scale
LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
GELU_SLOPE = np.float32(1.5957691216057308)  # 2·√(2/π)
GELU_CUBIC = np.float32(0.044715)
SQRT_HALF = np.float32(0.707106781186547524)
EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def quiet(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """NaN, infinities and overflow are values here, not warnings."""

    @functools.wraps(function)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return wrapped


def flush_denormals(x: Operand) -> F32:
    """DAZ: a denormal becomes zero of its sign."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < np.float32(MIN_NORMAL), np.copysign(np.float32(0), x), x)


def widen(x: Operand) -> F64:
    """An operand as float64, with DAZ."""
    return flush_denormals(x).astype(np.float64)


def narrow(x: F64) -> F32:
    """Rounds to float32, to nearest even, with FTZ."""
    flushed = np.where(np.abs(x) < FLUSH_BELOW, np.copysign(0.0, x), x)
    return flushed.astype(np.float32)


@quiet
def add(a: Operand, b: Operand) -> F32:
    return narrow(widen(a) + widen(b))


@quiet
def subtract(a: Operand, b: Operand) -> F32:
    return narrow(widen(a) - widen(b))


@quiet
def multiply(a: Operand, b: Operand) -> F32:
    return narrow(widen(a) * widen(b))


@quiet
def divide(a: Operand, b: Operand) -> F32:
    return narrow(widen(a) / widen(b))


@quiet
def square_root(a: F32) -> F32:
    return narrow(np.sqrt(widen(a)))


@quiet
def fma32(a: Operand, b: Operand, c: Operand) -> F32:
    """a·b + c with one rounding."""
    a, b, c = np.broadcast_arrays(a, b, c)
    return accumulate((widen(a) * widen(b))[np.newaxis], c)


@quiet
def accumulate(products: F64, start: F32) -> F32:
    """A chain of fused multiply-adds: acc = fma(product, acc) over axis 0, each product exact in float64.

    Runs optimistically (sum in float64, round to float32), then redoes the columns where that may round twice.
    """
    steps = len(products)
    products = products.reshape(steps, -1)
    first = flush_denormals(start).reshape(-1)
    sums = np.empty_like(products)
    acc = first.copy()
    for step in range(steps):
        np.add(products[step], acc, out=sums[step])
        acc = sums[step].astype(np.float32)
    doubtful = _columns_in_doubt(products, sums, first)
    if doubtful.size:
        careful = first[doubtful]
        for product in products[:, doubtful]:
            careful = _fused_step(product, careful)
        acc[doubtful] = careful
    return acc.reshape(start.shape)


def _columns_in_doubt(products: F64, sums: F64, first: F32) -> NDArray[np.intp]:
    """Columns where a sum nears the underflow limit, or is inexact and halfway between two float32 values."""
    tiny = (np.abs(sums) <= MIN_NORMAL) & (sums != 0)
    step, column = np.nonzero((sums.view(np.int64) & DROPPED_BITS) == HALFWAY)
    before = np.where(step > 0, sums[step - 1, column], first[column]).astype(np.float32)
    error = _sum_error(products[step, column], before.astype(np.float64), sums[step, column])
    return np.union1d(np.flatnonzero(tiny.any(axis=0)), column[error != 0])


def _sum_error(a: F64, b: F64, total: F64) -> F64:
    """TwoSum (Knuth): a + b = total + error, exactly."""
    b_part = total - a
    return (a - (total - b_part)) + (b - b_part)


def _fused_step(product: F64, acc: F32) -> F32:
    """One fma: the float64 sum rounded to odd, so that rounding to float32 sees every lost bit."""
    addend = acc.astype(np.float64)
    total = product + addend
    error = _sum_error(product, addend, total)
    bits = total.view(np.int64)
    lost = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    toward = np.where(np.signbit(error) == np.signbit(total), 1, -1)
    return narrow(np.where(lost, bits + toward, bits).view(np.float64))


def to_bf16(x: F32) -> NDArray[np.uint16]:
    """The bits of x rounded to bfloat16."""
    bits = flush_denormals(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(x), (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(x: F32) -> F32:
    """x rounded to bfloat16, as float32."""
    return from_bf16(to_bf16(x))


def _polynomial(x: F32, coefficients: tuple[float, ...]) -> F32:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = fma32(value, x, np.float32(coefficient))
    return value


def exp(x: F32) -> F32:
    """eˣ after Cephes expf: exactly 0 below −87, saturated above 88."""
    x = flush_denormals(x)
    vanishes = x < np.float32(-87)
    x = np.where(vanishes, np.float32(0), np.minimum(x, np.float32(88)))
    n = np.rint(multiply(x, LOG2_E))
    r = fma32(n, -LN2_HIGH, x)
    r = fma32(n, -LN2_LOW, r)
    y = fma32(_polynomial(r, EXP_COEFFICIENTS), multiply(r, r), r)
    exponent = np.where(np.isnan(n), np.float32(0), n).astype(np.int32)
    power = ((exponent + 127) << 23).view(np.float32)
    y = multiply(add(y, np.float32(1)), power)
    return np.where(vanishes, np.float32(0), y)


def log(x: F32) -> F32:
    """ln x for finite x ≥ 0, after Cephes logf."""
    x = flush_denormals(x)
    m, exponent = np.frexp(x)
    low = m < SQRT_HALF
    e = np.where(low, exponent - 1, exponent).astype(np.float32)
    f = subtract(np.where(low, m + m, m), np.float32(1))
    z = multiply(f, f)
    y = multiply(multiply(_polynomial(f, LOG_COEFFICIENTS), f), z)
    y = fma32(e, LN2_LOW, y)
    y = fma32(np.float32(-0.5), z, y)
    y = add(f, y)
    return np.where(x == 0, np.float32(-np.inf), fma32(e, LN2_HIGH, y))


def silu(x: F32) -> F32:
    """x / (1 + e⁻ˣ)."""
    return divide(x, add(np.float32(1), exp(-x)))


def gelu(x: F32) -> F32:
    """The tanh form: x/2 · (1 + tanh y) = x / (1 + e^−2y), y = √(2/π) · (x + 0.044715 x³)."""
    cubic = fma32(GELU_CUBIC, multiply(x, x), np.float32(1))
    twice_y = multiply(multiply(x, GELU_SLOPE), cubic)
    return divide(x, add(np.float32(1), exp(-twice_y)))


def sin_cos(angle: F32) -> tuple[F32, F32]:
    """Sine and cosine of angles ≥ 0, in float64 without fma, each rounded once."""
    a = widen(angle)
    n = np.rint(a * 0.63661977236758134308)
    r = a - n * 1.57079632673412561417e00
    r = r - n * 6.07710050650619224932e-11
    z = r * r
    p = 2.75573137070700676789e-06 + z * (
        -2.50507602534068634195e-08 + z * 1.58969099521155010221e-10
    )
    p = 8.33333333332248946124e-03 + z * (-1.98412698298579493134e-04 + z * p)
    sine = r + (r * z) * (-1.66666666666666324348e-01 + z * p)
    p = -2.75573143513906633035e-07 + z * (
        2.08757232129817482790e-09 + z * -1.13596475577881948265e-11
    )
    p = -1.38888888888741095749e-03 + z * (2.48015872894767294178e-05 + z * p)
    cosine = (1 - 0.5 * z) + (z * z) * (4.16666666666666019037e-02 + z * p)
    quadrant = n.astype(np.int64) % 4
    return (
        narrow(np.choose(quadrant, [sine, cosine, -sine, -cosine])),
        narrow(np.choose(quadrant, [cosine, -sine, -cosine, sine])),
    )


def _reduce_rows(terms: F64) -> F32:
    """Sums exact terms [rows, n] in the contract's order: 16 lanes per cut of 4,096, cuts ascending."""
    rows, width = terms.shape
    total: F32 | None = None
    for begin in range(0, width, CUT):
        cut = terms[:, begin : begin + CUT]
        padded = np.pad(cut, ((0, 0), (0, -cut.shape[1] % LANES)))  # + 0 changes no lane
        steps = padded.reshape(rows, -1, LANES).transpose(1, 0, 2)
        lanes = accumulate(steps, np.zeros((rows, LANES), np.float32))
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = add(lanes[:, :half], lanes[:, half:])
        total = lanes[:, 0] if total is None else add(total, lanes[:, 0])
    assert total is not None
    return total


def row_sum(x: F32) -> F32:
    """Sum over the last axis."""
    return _reduce_rows(widen(x).reshape(-1, x.shape[-1])).reshape(x.shape[:-1])


@quiet
def row_sum_of_squares(x: F32) -> F32:
    """Sum of squares over the last axis."""
    wide = widen(x).reshape(-1, x.shape[-1])
    return _reduce_rows(wide * wide).reshape(x.shape[:-1])


def log_sum_exp(x: F32) -> F32:
    """max + ln Σ e^(x − max) over the last axis."""
    peak = x.max(axis=-1)
    return add(peak, log(row_sum(exp(subtract(x, peak[..., np.newaxis])))))


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x / √(mean x² + eps) · weight over the last axis."""
    mean = divide(row_sum_of_squares(x), np.float32(x.shape[-1]))
    inverse = divide(np.float32(1), square_root(add(mean, np.float32(eps))))
    return multiply(multiply(x, inverse[..., np.newaxis]), weight)


@quiet
def quantise(x: F32) -> tuple[F32, F32, F32]:
    """Groups of 32 activations of each row as integers −127…127.

    x: [rows, n]. Returns q [rows, n/32, 32] and, per group, scale d and sum S of q [rows, n/32]; integers as float32.
    """
    q, d = quantise_groups(x.reshape(len(x), -1, GROUP))
    return q, d, q.sum(axis=-1)


@quiet
def quantise_groups(groups: F32) -> tuple[F32, F32]:
    """The last axis as integers −127…127 (float32) that share a scale d, which has one axis less."""
    groups = flush_denormals(groups)
    peak = np.abs(groups).max(axis=-1)
    broken = ~np.isfinite(peak)
    empty = ~(peak >= np.float32(2.0**-100))
    unused = broken | empty
    divisor = np.where(unused, np.float32(1), peak)
    q = np.rint(multiply(groups, divide(np.float32(127), divisor)[..., np.newaxis]))
    q = np.where(unused[..., np.newaxis], np.float32(0), q)
    d = np.where(empty, np.float32(0), divide(divisor, np.float32(127)))
    return q, np.where(broken, np.float32(np.nan), d)
