"""How likely counts at least so far from their expectation are, if that is true."""

from __future__ import annotations

from math import exp, lgamma, log

import numpy as np
from numpy.typing import NDArray

SMALLEST_EXPECTATION = 10.0


def p_value(observed: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """Pearson's chi-square. `law` are probabilities; cells expected below 10 are pooled, impossible ones must be empty."""
    assert not observed[law == 0].any(), "something impossible was drawn"
    expected = law * observed.sum()
    rare = expected < SMALLEST_EXPECTATION
    counts = np.append(observed[~rare], observed[rare].sum())
    shares = np.append(expected[~rare], expected[rare].sum())
    if shares[-1] < SMALLEST_EXPECTATION:  # too few even together: into the smallest cell
        counts[-2] += counts[-1]
        shares[-2] += shares[-1]
        counts, shares = counts[:-1], shares[:-1]
    statistic = float(((counts - shares) ** 2 / shares).sum())
    return upper_gamma((len(counts) - 1) / 2, statistic / 2)


def upper_gamma(a: float, x: float) -> float:
    """The regularised incomplete gamma function Q(a, x): a series below a + 1, a continued fraction above (Lentz)."""
    if x <= 0:
        return 1.0
    scale = exp(a * log(x) - x - lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        for n in range(1, 10_000):
            term *= x / (a + n)
            total += term
            if term < total * 1e-16:
                break
        return 1 - scale * total
    b = x + 1 - a
    c, d = 1e300, 1 / b
    fraction = d
    for n in range(1, 10_000):
        factor = -n * (n - a)
        b += 2
        d = 1 / (factor * d + b)
        c = b + factor / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return scale * fraction
