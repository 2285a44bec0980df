"""Packed weights do not waste what the file saved."""

from __future__ import annotations

import pytest

from poise.kernels.cpu.backend import CPUBackend
from poise.kernels.ops import KVShape
from poise.weights.checkpoint import RawTensor
from poise.weights.dequantize import GGML_TYPES
from poise.weights.random_blocks import random_matrix


@pytest.mark.parametrize("type_name", GGML_TYPES)
def test_a_packed_matrix_has_at_most_three_percent_more_bytes_than_the_file(type_name: str) -> None:
    data = random_matrix(type_name, 64, 1024, seed=1)
    backend = CPUBackend(KVShape(1, 1, 16, 16, 1), max_rows=1, threads=1)
    packed = backend.matrix(RawTensor("w", type_name, (64, 1024), data))
    assert packed.nbytes <= 1.03 * data.nbytes  # type: ignore[attr-defined]
