"""Inverse frequencies of rotary embeddings, the same on every machine.

1/theta^(2i/dim) in decimal arithmetic, rounded to float64 and float32, then divided (float32) by the pair's factor.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from poise.kernels.ops import RopeTable
from poise.models.config import RopeConfig


def rope_table(rope: RopeConfig) -> RopeTable:
    """float32 [dim/2] inverse frequencies of the pairs (Su et al. 2021, section 3.2.2)."""
    with localcontext() as context:
        context.prec = 30
        base = Decimal(rope.theta)
        exact = [float(base ** (Decimal(-2 * i) / Decimal(rope.dim))) for i in range(rope.dim // 2)]
    frequencies: NDArray[np.float32] = np.array(exact, dtype=np.float64).astype(np.float32)
    if rope.factors is not None:
        frequencies = (frequencies / np.array(rope.factors, dtype=np.float32)).astype(np.float32)
    return RopeTable(frequencies)
