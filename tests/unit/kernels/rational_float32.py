"""A slow twin of float32 arithmetic with FTZ and DAZ, over exact rationals and single numbers.

Tests only. Knows nothing of numpy's rounding: each result is the exact value, rounded once.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

SMALLEST = Fraction(1, 2**126)


def operand(x: float) -> Fraction:
    """The exact value of a finite float32; a denormal is zero."""
    value = Fraction(float(x))
    return value if abs(value) >= SMALLEST else Fraction(0)


def rounded(value: Fraction) -> float:
    """To 24 bits, to nearest even; then overflow and underflow. An exact zero is +0."""
    if value == 0:
        return 0.0
    exponent = math.frexp(abs(value.numerator / value.denominator))[1]
    quantum = Fraction(2) ** (exponent - 24)
    if abs(value) / quantum >= 2**24:
        quantum *= 2
    elif abs(value) / quantum < 2**23:
        quantum /= 2
    result = round(value / quantum) * quantum
    if abs(result) < SMALLEST:
        return math.copysign(0.0, value)
    if abs(result) >= 2**128:
        return math.copysign(math.inf, value)
    return float(result)


def fma(a: float, b: float, c: float) -> float:
    return rounded(operand(a) * operand(b) + operand(c))


def add(a: float, b: float) -> float:
    return rounded(operand(a) + operand(b))


def multiply(a: float, b: float) -> float:
    return rounded(operand(a) * operand(b))


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal bits; the two zeros count as equal where the rational twin can't know the sign."""
    left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
    return bool(((left.view(np.uint32) == right.view(np.uint32)) | (left == right)).all())
