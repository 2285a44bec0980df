"""Four-bit copies: levels that the original had survive, others move by half a step at most."""

from __future__ import annotations

import numpy as np
import pytest

from poise.weights.checkpoint import RawTensor
from poise.weights.dequantize import dequantize
from poise.weights.four_bit import FourBitCheckpoint, four_bit, quantize
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, write_gguf


def matrix(values: np.ndarray, order: np.ndarray | None = None) -> RawTensor:
    return RawTensor("w", "F32", values.shape, values.astype(np.float32).view(np.uint8), order)


def test_a_value_moves_by_half_a_step_at_most() -> None:
    values = np.random.default_rng(1).standard_normal((50, 96)).astype(np.float32)
    groups = values.reshape(-1, 32)
    step = (groups.max(axis=1) - groups.min(axis=1)) / 15
    moved = dequantize(four_bit(matrix(values))).reshape(-1, 32) - groups
    assert (np.abs(moved) <= 0.51 * step[:, None] + 2e-3).all()
    assert np.abs(moved).max() > 0.4 * step.min()


def test_what_has_four_bits_keeps_them() -> None:
    rng = np.random.default_rng(2)
    levels = rng.integers(0, 16, (40, 32))
    levels[:, :2] = 0, 15  # the whole range, so that scale and minimum are found again
    scale = rng.integers(1, 64, (40, 1)) / 64
    values = (levels * scale - rng.integers(0, 64, (40, 1)) / 8).astype(np.float32)
    assert np.array_equal(dequantize(four_bit(matrix(values))), values)


def test_a_flat_group_stays_flat() -> None:
    assert np.array_equal(
        dequantize(four_bit(matrix(np.full((3, 64), 0.25)))), np.full((3, 64), 0.25)
    )


def test_rows_stay_where_they_were() -> None:
    values = np.random.default_rng(3).standard_normal((6, 32)).astype(np.float32)
    order = np.array([5, 0, 3, 1, 4, 2], np.int32)
    coarse = four_bit(matrix(values, order))
    assert coarse.row_order is order
    assert np.array_equal(coarse.data, quantize(values))


@pytest.mark.parametrize("container", ["F16", "BF16", "Q8_0", "F32"])
def test_a_checkpoint_changes_its_matrices_only(tmp_path, container: str) -> None:  # type: ignore[no-untyped-def]
    model = TinyModel("llama", num_heads=6, num_kv_heads=2, seed=1)
    original = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, container))
    coarse = FourBitCheckpoint(original)
    for name in ("embed", "layers.0.q", "layers.1.down"):
        fine, rough = dequantize(original.tensor(name)), dequantize(coarse.tensor(name))
        assert coarse.tensor(name).type == "Q4_1"
        assert 0 < np.abs(fine - rough).mean() < 0.1 * np.abs(fine).mean()
    assert np.array_equal(coarse.tensor("norm").data, original.tensor("norm").data)
    assert coarse.has("norm")
    assert not coarse.has("nothing")
