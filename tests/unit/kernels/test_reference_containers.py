"""Unpacked weights against the `gguf` package, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from poise.errors import ModelFileError
from poise.kernels.reference_containers import IntegerWeights, unpack, unpack_vector
from poise.weights.checkpoint import RawTensor

LEVELS = {"Q4_0": 16, "Q4_1": 16, "Q5_0": 32, "Q5_1": 32, "Q8_0": 256}
LEVELS |= {"Q4_K": 16, "Q5_K": 32, "Q6_K": 64}


def random_tensor(type_name, rows=6, columns=512, seed=0):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    return RawTensor("weight", type_name, (rows, columns), data)


def oracle(tensor):
    with np.errstate(all="ignore"):
        return gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.type])


def equal_bits(left, right):
    bits = np.ascontiguousarray(left).view(np.uint32), np.ascontiguousarray(right).view(np.uint32)
    return bool(((bits[0] == bits[1]) | (np.isnan(left) & np.isnan(right))).all())


@pytest.mark.parametrize("type_name", [*LEVELS, "F32", "F16", "BF16"])
def test_dequantised_values_equal_gguf(type_name):
    tensor = random_tensor(type_name)
    assert equal_bits(unpack(tensor).dequantise(), oracle(tensor))


@pytest.mark.parametrize(("type_name", "levels"), LEVELS.items())
def test_integer_weights_are_levels_scales_minima(type_name, levels):
    weights = unpack(random_tensor(type_name, seed=1))
    assert isinstance(weights, IntegerWeights)
    assert weights.levels.dtype == np.uint8
    assert set(np.unique(weights.levels)) == set(range(levels))
    assert (weights.minima is not None) == (type_name in {"Q4_1", "Q5_1", "Q4_K", "Q5_K"})
    assert weights.group == (16 if type_name == "Q6_K" else 32)
    assert weights.scales.shape == (6, 512 // weights.group)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K", "F16"])
def test_row_order_names_the_stored_row(type_name):
    plain = random_tensor(type_name, seed=2)
    order = np.array([3, 0, 5, 1, 2, 4], np.int32)
    tensor = RawTensor("weight", type_name, plain.shape, plain.data, order)
    assert equal_bits(unpack(tensor).dequantise(), oracle(plain)[order])
    some = np.array([4, 4, 0], np.int32)
    assert equal_bits(unpack(tensor, some).dequantise(), oracle(plain)[order[some]])


def test_vectors():
    values = np.array([1.5, -2, 0, 7], np.float32)
    data = values.view(np.uint8)[np.newaxis]
    assert np.array_equal(unpack_vector(RawTensor("norm", "F32", (4,), data)), values)
    order = np.array([2, 3, 1, 0], np.int32)
    assert np.array_equal(unpack_vector(RawTensor("bias", "F32", (4,), data, order)), values[order])


def test_unknown_types_are_refused():
    data = np.zeros((1, 18), np.uint8)
    with pytest.raises(ModelFileError, match="blk: type IQ2_S is not one of F32"):
        unpack(RawTensor("blk", "IQ2_S", (1, 32), data))
    with pytest.raises(ModelFileError, match="norm: a vector of type Q4_0"):
        unpack_vector(RawTensor("norm", "Q4_0", (32,), data))
