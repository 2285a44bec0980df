"""Dequantisation equals the `gguf` package bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize

from poise.weights.checkpoint import RawTensor
from poise.weights.dequantize import GGML_TYPES, dequantize
from tiny_models import SCALE_OFFSETS, random_blocks

QUANTISED = sorted(SCALE_OFFSETS)
EDGE_SCALES = [0.0, -0.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0]


def raw(type_name: str, rows: np.ndarray) -> RawTensor:
    kind = GGML_TYPES[type_name]
    columns = rows.shape[1] // kind.block_bytes * kind.block_size
    return RawTensor("t", type_name, (rows.shape[0], columns), rows)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def oracle(type_name: str, rows: np.ndarray) -> np.ndarray:
    return gguf_dequantize(rows, gguf.GGMLQuantizationType[type_name]).astype(np.float32)


def test_table_agrees_with_the_gguf_package() -> None:
    for name, entry in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (entry.id, entry.block_size, entry.block_bytes) == (
            kind.value,
            *gguf.GGML_QUANT_SIZES[kind],
        )


@pytest.mark.parametrize("type_name", QUANTISED)
def test_random_blocks(type_name: str) -> None:
    kind = GGML_TYPES[type_name]
    for seed in range(5):
        rows = random_blocks(type_name, (7, 3 * kind.block_size), seed)
        assert_same_bits(dequantize(raw(type_name, rows)), oracle(type_name, rows))


@pytest.mark.parametrize("type_name", QUANTISED)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F, 0x55, 0xAA])
def test_edge_bytes_with_edge_scales(type_name: str, fill: int) -> None:
    kind = GGML_TYPES[type_name]
    rows = np.full((len(EDGE_SCALES), 2 * kind.block_bytes), fill, dtype=np.uint8)
    scales = np.array(EDGE_SCALES, dtype="<f2").view(np.uint8).reshape(-1, 2)
    for number, offset in enumerate(SCALE_OFFSETS[type_name]):
        for block in range(2):
            start = block * kind.block_bytes + offset
            rows[:, start : start + 2] = np.roll(scales, number + block, axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(dequantize(raw(type_name, rows)), oracle(type_name, rows))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_floats(type_name: str) -> None:
    width = GGML_TYPES[type_name].block_bytes
    rows = np.random.default_rng(1).integers(0, 256, (5, 64 * width), np.uint8)
    with np.errstate(invalid="ignore"):
        assert_same_bits(dequantize(raw(type_name, rows)), oracle(type_name, rows))


def test_many_blocks_cross_the_chunk_limit() -> None:
    rows = random_blocks("Q4_1", (1030, 1024), 3)  # 32,960 blocks
    assert_same_bits(dequantize(raw("Q4_1", rows)), oracle("Q4_1", rows))


def test_row_order_and_vectors() -> None:
    rows = random_blocks("Q8_0", (4, 64), 5)
    order = np.array([2, 0, 3, 1], dtype=np.int32)
    tensor = RawTensor("t", "Q8_0", (4, 64), rows, order)
    assert_same_bits(dequantize(tensor), oracle("Q8_0", rows)[order])
    vector = np.arange(6, dtype=np.float32)
    data = vector.view(np.uint8).reshape(1, -1)
    assert_same_bits(dequantize(RawTensor("v", "F32", (6,), data)), vector)
