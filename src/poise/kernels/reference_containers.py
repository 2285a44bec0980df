"""Weight tensors of a file, unpacked into plain arrays: levels, scales and minima, or float values.

Owns the block formats of GGML; knows no arithmetic beyond (u − z)·s + min.
Invariant: a dequantised value equals the `gguf` package's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poise.errors import ModelFileError
from poise.weights.checkpoint import RawTensor

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Unpacked = tuple[U8, F32, F32 | None]  # levels, scales, minima; block by block


@dataclass(frozen=True, slots=True)
class IntegerWeights:
    """value = (level − zero)·scale + minimum, scale and minimum per group of columns.

    levels: uint8 [rows, columns]. scales, minima: float32 [rows, columns / group].
    """

    levels: U8
    zero: int
    group: int
    scales: F32
    minima: F32 | None

    def dequantise(self) -> F32:
        rows, columns = self.levels.shape
        centred = (self.levels.astype(np.int16) - self.zero).astype(np.float32)
        with np.errstate(all="ignore"):
            values = centred.reshape(rows, -1, self.group) * self.scales[..., np.newaxis]
            if self.minima is not None:
                values = values + self.minima[..., np.newaxis]
        return values.reshape(rows, columns)


@dataclass(frozen=True, slots=True)
class FloatWeights:
    """values: float32 [rows, columns]; `type` F32, F16 or BF16 says how a product with them is formed."""

    values: F32
    type: str

    def dequantise(self) -> F32:
        return self.values


@dataclass(frozen=True, slots=True)
class _BlockFormat:
    """`unpack` takes blocks uint8 [rows, blocks, block_bytes] and returns arrays with the same first two axes."""

    block_bytes: int
    zero: int
    group: int
    unpack: Callable[[U8], Unpacked]


def unpack(
    tensor: RawTensor, rows: NDArray[np.int32] | None = None
) -> IntegerWeights | FloatWeights:
    """The tensor, or its given logical rows, unpacked. ModelFileError for an unknown type."""
    data = tensor.data
    if rows is None:
        data = data if tensor.row_order is None else data[tensor.row_order]
    else:
        data = data[rows if tensor.row_order is None else tensor.row_order[rows]]
    if tensor.type in _FLOAT_READERS:
        return FloatWeights(_FLOAT_READERS[tensor.type](data), tensor.type)
    if tensor.type not in _BLOCK_FORMATS:
        known = " ".join([*_FLOAT_READERS, *_BLOCK_FORMATS])
        raise ModelFileError(f"tensor {tensor.name}: type {tensor.type} is not one of {known}")
    form = _BLOCK_FORMATS[tensor.type]
    levels, scales, minima = form.unpack(data.reshape(len(data), -1, form.block_bytes))
    return IntegerWeights(
        levels.reshape(len(data), -1),
        form.zero,
        form.group,
        scales.reshape(len(data), -1),
        None if minima is None else minima.reshape(len(data), -1),
    )


def unpack_vector(tensor: RawTensor) -> F32:
    """A float vector [n]; `row_order`, where given, orders its elements."""
    if tensor.type not in _FLOAT_READERS:
        raise ModelFileError(f"tensor {tensor.name}: a vector of type {tensor.type} is not float")
    values = _FLOAT_READERS[tensor.type](tensor.data).reshape(-1)
    return values if tensor.row_order is None else values[tensor.row_order]


def _read_f32(data: U8) -> F32:
    return np.ascontiguousarray(data).view("<f4").astype(np.float32)


def _read_f16(data: U8) -> F32:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _read_bf16(data: U8) -> F32:
    return (np.ascontiguousarray(data).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _half(blocks: U8, offset: int) -> F32:
    """The f16 at that byte of each block: [rows, blocks, 1]."""
    return _read_f16(blocks[..., offset : offset + 2])


def _nibbles(packed: U8) -> U8:
    """Low nibbles of the last axis, then its high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: U8) -> U8:
    """32 bits, lowest first, each moved to bit 4."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: U8) -> Unpacked:
    return _nibbles(blocks[..., 2:18]), _half(blocks, 0), None


def _q4_1(blocks: U8) -> Unpacked:
    return _nibbles(blocks[..., 4:20]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: U8) -> Unpacked:
    levels = _nibbles(blocks[..., 6:22]) | _fifth_bits(blocks[..., 2:6])
    return levels, _half(blocks, 0), None


def _q5_1(blocks: U8) -> Unpacked:
    levels = _nibbles(blocks[..., 8:24]) | _fifth_bits(blocks[..., 4:8])
    return levels, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: U8) -> Unpacked:
    return blocks[..., 2:34] ^ np.uint8(0x80), _half(blocks, 0), None  # two's complement + 128


def _k_scales_and_minima(blocks: U8) -> tuple[F32, F32]:
    """Eight 6-bit scales and minima: four in the low bits of bytes 4…11, four spread over bytes 12…15 and the high bits."""
    first, second, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([first & 63, (high & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (high >> 4) | (second >> 6 << 4)], axis=-1)
    with np.errstate(all="ignore"):
        return _half(blocks, 0) * scales.astype(np.float32), -(
            _half(blocks, 2) * minima.astype(np.float32)
        )


def _k_nibbles(packed: U8) -> U8:
    """Each 32 bytes hold a group in their low nibbles and the next one in their high nibbles: [..., 8, 32]."""
    quarters = packed.reshape(*packed.shape[:-1], 4, 32)
    return _nibbles(quarters).reshape(*packed.shape[:-1], 8, 32)


def _q4_k(blocks: U8) -> Unpacked:
    return _k_nibbles(blocks[..., 16:144]), *_k_scales_and_minima(blocks)


def _q5_k(blocks: U8) -> Unpacked:
    shifts = np.arange(8, dtype=np.uint8)[:, np.newaxis]
    fifth = (blocks[..., np.newaxis, 16:48] >> shifts & np.uint8(1)) << np.uint8(
        4
    )  # bit g belongs to group g
    return _k_nibbles(blocks[..., 48:176]) | fifth, *_k_scales_and_minima(blocks)


def _q6_k(blocks: U8) -> Unpacked:
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, np.newaxis]
    upper = (high >> shifts & np.uint8(3)) << np.uint8(4)
    levels = _nibbles(low).reshape(*low.shape[:-1], 4, 32) | upper
    with np.errstate(all="ignore"):
        scales = _half(blocks, 208) * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return levels, scales, None


_FLOAT_READERS: dict[str, Callable[[U8], F32]] = {
    "F32": _read_f32,
    "F16": _read_f16,
    "BF16": _read_bf16,
}
_BLOCK_FORMATS = {
    "Q4_0": _BlockFormat(18, 8, 32, _q4_0),
    "Q4_1": _BlockFormat(20, 0, 32, _q4_1),
    "Q5_0": _BlockFormat(22, 16, 32, _q5_0),
    "Q5_1": _BlockFormat(24, 0, 32, _q5_1),
    "Q8_0": _BlockFormat(34, 128, 32, _q8_0),
    "Q4_K": _BlockFormat(144, 0, 32, _q4_k),
    "Q5_K": _BlockFormat(176, 0, 32, _q5_k),
    "Q6_K": _BlockFormat(210, 32, 16, _q6_k),
}
