"""The arithmetic of the reference against exact rationals and against its definition in docs/NUMERICS.md."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import rational_float32 as rational
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.kernels import reference_math as math

COUNT = 4000


def random_bits(rng, count, low_exponent=0, high_exponent=254):
    exponent = rng.integers(low_exponent, high_exponent + 1, count, dtype=np.uint32)
    mantissa = rng.integers(0, 2**23, count, dtype=np.uint32)
    trailing = rng.integers(0, 24, count, dtype=np.uint32)
    mantissa = np.where(rng.random(count) < 0.5, mantissa >> trailing << trailing, mantissa)
    sign = rng.integers(0, 2, count, dtype=np.uint32)
    return (sign << 31 | exponent << 23 | mantissa).view(np.float32)


def any_exponent(rng):
    return tuple(random_bits(rng, COUNT) for _ in range(3))


def near_one(rng):
    return tuple(random_bits(rng, COUNT, 120, 134) for _ in range(3))


def cancelling(rng):
    a, b = random_bits(rng, COUNT, 100, 150), random_bits(rng, COUNT, 100, 150)
    c = -(a * b)
    return a, b, (c.view(np.uint32) + rng.integers(0, 3, COUNT, dtype=np.uint32)).view(np.float32)


def near_halfway(rng):
    """a·b is half a unit in the last place of c, but for a bit far below what float64 sees."""
    c = random_bits(rng, COUNT, 100, 150)
    half = np.ldexp(np.float32(1), np.frexp(c)[1] - 25)
    nudge = rng.integers(-1, 2, COUNT).astype(np.float32) * np.float32(2.0**-23)
    a = np.where(rng.random(COUNT) < 0.5, half, -half) * (1 + nudge)
    return a.astype(np.float32), (1 - nudge).astype(np.float32), c


def near_underflow(rng):
    a, b = random_bits(rng, COUNT, 60, 68), random_bits(rng, COUNT, 58, 66)
    return a, b, random_bits(rng, COUNT, 0, 3)


CASES = [any_exponent, near_one, cancelling, near_halfway, near_underflow]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_fma_rounds_once(case):
    a, b, c = case(np.random.default_rng(1))
    expected = [rational.fma(*values) for values in zip(a, b, c)]
    assert rational.same(math.fma32(a, b, c), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_elementary_operations_round_once(case):
    a, b, c = case(np.random.default_rng(2))
    assert rational.same(math.add(a, c), [rational.add(*v) for v in zip(a, c)])
    assert rational.same(math.subtract(a, c), [rational.add(x, -y) for x, y in zip(a, c)])
    assert rational.same(math.multiply(a, b), [rational.multiply(*v) for v in zip(a, b)])
    b = np.where(np.abs(b) < 2.0**-126, np.float32(1), b)
    expected = [rational.rounded(rational.operand(x) / Fraction(float(y))) for x, y in zip(a, b)]
    assert rational.same(math.divide(a, b), expected)


def test_square_root_rounds_once():
    x = np.abs(random_bits(np.random.default_rng(3), COUNT, 1))
    roots = math.square_root(x)
    for value, root, below, above in zip(
        x, roots, np.nextafter(roots, np.float32(0)), np.nextafter(roots, np.float32(np.inf))
    ):
        value, root = Fraction(float(value)), Fraction(float(root))
        assert ((root + Fraction(float(below))) / 2) ** 2 <= value
        assert value <= ((root + Fraction(float(above))) / 2) ** 2


def test_flush_limit_is_judged_after_rounding():
    smallest = np.float32(2.0**-126)
    half_ulp_less = np.float32(1 - 2.0**-24)  # IEEE alone would round the product up to 2^-126
    assert math.multiply(smallest, half_ulp_less) == 0
    assert np.signbit(math.multiply(smallest, -half_ulp_less))
    ulp = np.float32(2.0**-23)
    low = np.float32(1 - 2.0**-24)
    # (1 + 2^-23)(1 − 2^-24) = 1 + 2^-24 − 2^-47: rounds to 1, so the product is the smallest normal number.
    assert math.multiply(smallest * (1 + ulp), low) == smallest


def test_denormal_operands_are_zero():
    tiny = np.array([1e-40, -1e-40], np.float32)
    assert np.array_equal(np.signbit(math.add(tiny, tiny)), [False, True])
    assert (math.multiply(tiny, np.float32(1e38)) == 0).all()
    assert np.isneginf(math.log(np.abs(tiny))).all()
    assert np.array_equal(math.to_bf16(tiny), [0, 0x8000])
    assert (math.fma32(tiny, np.float32(1e38), tiny) == 0).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_chain_equals_single_steps(seed, steps):
    """The optimistic chain finds every step that would round twice."""
    rng = np.random.default_rng(seed)
    a = random_bits(rng, steps * 50, 110, 140).reshape(steps, 50)
    b = math.round_bf16(random_bits(rng, steps * 50, 100, 150)).reshape(steps, 50)
    start = random_bits(rng, 50, 80, 160)
    expected = start
    for step in range(steps):
        expected = math.fma32(a[step], b[step], expected)
    chained = math.accumulate(math.widen(a) * math.widen(b), start)
    assert np.array_equal(chained.view(np.uint32), expected.view(np.uint32))


def test_bf16_rounds_to_nearest_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFF800000])
    x = bits.astype(np.uint32).view(np.float32)
    assert math.to_bf16(x).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80]


def ulps(actual, exact):
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return np.abs(actual.astype(np.float64) - exact) / spacing


def test_exp_is_within_two_ulp():
    x = np.linspace(-86.5, 88, 200_001, dtype=np.float32)
    assert ulps(math.exp(x), np.exp(x.astype(np.float64))).max() <= 2


def test_exp_at_its_ends():
    x = np.array([-np.inf, -1e30, np.nextafter(np.float32(-87), np.float32(-88)), -0.0, 0.0])
    assert math.exp(x.astype(np.float32)).tolist() == [0, 0, 0, 1, 1]
    high = math.exp(np.array([88, 89, np.inf, np.nan], np.float32))
    assert high[0] == high[1] == high[2] < np.inf
    assert np.isnan(high[3])


def test_log_is_within_two_ulp():
    rng = np.random.default_rng(4)
    x = np.concatenate([np.abs(random_bits(rng, 100_000, 1)), 1 + rng.normal(0, 0.01, 100_000)])
    x = x.astype(np.float32)
    exact = np.log(x.astype(np.float64))
    assert ulps(math.log(x), exact)[exact != 0].max() <= 2
    assert math.log(np.array([0, 1], np.float32)).tolist() == [-np.inf, 0]
    assert np.isnan(math.log(np.float32([np.nan])))


def test_silu():
    x = np.linspace(-100, 100, 10_001, dtype=np.float32)
    wide = x.astype(np.float64)
    assert np.allclose(math.silu(x), wide / (1 + np.exp(-wide)), rtol=1e-6, atol=1e-34)


def test_gelu():
    x = np.concatenate([np.linspace(-12, 12, 10001), [0.0, -0.0, 1e-30, 100, 1e4, -100, -1e4]])
    x = x.astype(np.float32)
    wide = x.astype(np.float64)
    y = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    expected = 0.5 * wide * (1 + np.tanh(y))
    assert np.allclose(math.gelu(x), expected, rtol=3e-6, atol=1e-8)
    assert np.isnan(math.gelu(np.float32([np.nan]))).all()
    assert math.gelu(np.float32([np.inf, 3e38])).tolist() == [np.inf, np.float32(3e38)]


def test_sin_cos_are_rounded_from_double():
    angle = np.concatenate([np.linspace(0, 10, 50_001), np.geomspace(1e-30, 131072, 50_001)])
    angle = angle.astype(np.float32)
    sine, cosine = math.sin_cos(angle)
    wide = angle.astype(np.float64)
    assert ulps(sine, np.sin(wide))[wide > 0].max() <= 0.5001
    assert ulps(cosine, np.cos(wide)).max() <= 0.5001


def slow_sum(terms, step):
    total = None
    for begin in range(0, len(terms), 4096):
        lanes = [0.0] * 16
        for index, value in enumerate(terms[begin : begin + 4096]):
            lanes[index % 16] = step(value, lanes[index % 16])
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [rational.add(lanes[i], lanes[i + half]) for i in range(half)]
        total = lanes[0] if total is None else rational.add(total, lanes[0])
    return total


@pytest.mark.parametrize("width", [1, 16, 17, 64, 4096, 8300])
def test_row_reductions_follow_their_order(width):
    x = np.random.default_rng(width).normal(size=(2, width)).astype(np.float32)
    sums = [slow_sum(row, rational.add) for row in x]
    squares = [slow_sum(row, lambda value, lane: rational.fma(value, value, lane)) for row in x]
    assert rational.same(math.row_sum(x), sums)
    assert rational.same(math.row_sum_of_squares(x), squares)


def test_log_sum_exp():
    z = np.random.default_rng(5).normal(0, 8, (3, 5000)).astype(np.float32)
    wide = z.astype(np.float64)
    assert np.allclose(math.log_sum_exp(z), np.log(np.exp(wide).sum(axis=1)), rtol=1e-6)


def test_rms_norm_is_close_to_the_formula():
    rng = np.random.default_rng(6)
    x, weight = rng.normal(size=(4, 576)), rng.normal(size=576)
    exact = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * weight
    actual = math.rms_norm(x.astype(np.float32), weight.astype(np.float32), 1e-5)
    assert np.allclose(actual, exact, rtol=1e-6)


def test_quantise():
    rng = np.random.default_rng(7)
    x = (rng.normal(size=(5, 64)) * np.geomspace(1e-20, 1e20, 5)[:, np.newaxis]).astype(np.float32)
    q, d, sums = math.quantise(x)
    assert np.abs(q).max() == 127
    assert np.array_equal(q.sum(axis=-1), sums)
    error = np.abs(q * d[..., np.newaxis] - x.reshape(q.shape))
    assert (error <= 0.5001 * d[..., np.newaxis]).all()


def test_quantise_extreme_groups():
    x = np.zeros((6, 32), np.float32)
    x[1, 3] = np.nan
    x[2, 4] = -np.inf
    x[3] = 1e-40
    x[4, 0], x[4, 1] = 2.0**-100, -(2.0**-101)
    x[5, 0], x[5, 1] = np.finfo(np.float32).max, 1
    q, d, sums = math.quantise(x)
    assert not q[:4].any()
    assert not sums[:4].any()
    assert d[0] == d[3] == 0
    assert np.isnan(d[1:3]).all()
    assert q[4, 0, :2].tolist() == [127, -64]  # −63.5 is a tie: to even
    assert q[5, 0, :2].tolist() == [127, 0]
    assert not np.signbit(math.quantise(np.float32([[np.nextafter(2.0**-100, 0)] * 32]))[1])
