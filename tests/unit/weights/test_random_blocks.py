"""Random weights in every storage type are finite, centred and scaled."""

from __future__ import annotations

import numpy as np
import pytest

from poise.weights.checkpoint import RawTensor
from poise.weights.dequantize import GGML_TYPES, dequantize
from poise.weights.random_blocks import random_matrix


@pytest.mark.parametrize("columns", [512, 14336])
@pytest.mark.parametrize("type_name", GGML_TYPES)
def test_values_are_centred_with_deviation_one_over_root_columns(
    type_name: str, columns: int
) -> None:
    data = random_matrix(type_name, 64, columns, seed=1)
    values = dequantize(RawTensor("w", type_name, (64, columns), data))
    scaled = values.astype(np.float64) * np.sqrt(columns)
    assert np.isfinite(scaled).all()
    assert 0.65 < scaled.std() < 1.5  # floats: to a power of two
    assert abs(scaled.mean()) < 0.15
    assert len(np.unique(values[0, :256])) > 8


def test_a_seed_fixes_the_bytes() -> None:
    first = random_matrix("Q4_K", 3, 256, seed=1)
    assert first.shape == (3, 144)
    assert (first == random_matrix("Q4_K", 3, 256, seed=1)).all()
    assert (first != random_matrix("Q4_K", 3, 256, seed=2)).any()
