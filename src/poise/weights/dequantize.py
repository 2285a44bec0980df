"""GGML tensor types and their exact expansion to f32.

Knows bytes and blocks, not files or models. Invariant: every value equals the `gguf` package's bit
for bit (same operations in the same order), and every element of the result is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poise.weights.checkpoint import RawTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_BLOCKS_AT_ONCE = 1 << 15  # bounds the temporaries, not the result


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A storage type: `block_size` elements lie in `block_bytes` bytes; `id` is its number in GGUF
    files.
    """

    name: str
    id: int
    block_size: int
    block_bytes: int


GGML_TYPES: dict[str, GGMLType] = {
    entry.name: entry
    for entry in (
        GGMLType("F32", 0, 1, 4),
        GGMLType("F16", 1, 1, 2),
        GGMLType("Q4_0", 2, 32, 18),
        GGMLType("Q4_1", 3, 32, 20),
        GGMLType("Q5_0", 6, 32, 22),
        GGMLType("Q5_1", 7, 32, 24),
        GGMLType("Q8_0", 8, 32, 34),
        GGMLType("Q4_K", 12, 256, 144),
        GGMLType("Q5_K", 13, 256, 176),
        GGMLType("Q6_K", 14, 256, 210),
        GGMLType("BF16", 30, 1, 2),
    )
}


def dequantize(tensor: RawTensor) -> Floats:
    """The tensor as float32 of `tensor.shape`, rows in logical order (`row_order` applied)."""
    ggml_type = GGML_TYPES[tensor.type]
    expand = _EXPANDERS[tensor.type]
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, ggml_type.block_bytes)
    values = np.empty((len(blocks), ggml_type.block_size), dtype=np.float32)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        stop = start + _BLOCKS_AT_ONCE
        values[start:stop] = expand(blocks[start:stop])
    matrix = values.reshape(tensor.shape)
    return matrix if tensor.row_order is None else matrix[tensor.row_order]


def _f16(two_bytes: Bytes) -> Floats:
    """f16 scales [n, 2] bytes as f32 [n, 1]."""
    return np.ascontiguousarray(two_bytes).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """Each run of `group` bytes gives its low nibbles, then its high nibbles."""
    runs = packed.reshape(len(packed), -1, 1, group)
    shifts = np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)
    return ((runs >> shifts) & np.uint8(0x0F)).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of a little-endian word is bit 4 of element i: [n, 4] bytes as [n, 32] of 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and minima of a Q4_K or Q5_K block: [n, 12] bytes as two [n, 8]."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minima = np.concatenate([middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _expand_f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _expand_f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _expand_bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _expand_q4_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 2:18], 16).astype(np.int8) - np.int8(8)
    return _f16(blocks[:, 0:2]) * quants.astype(np.float32)


def _expand_q4_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 4:20], 16).astype(np.float32)
    return _f16(blocks[:, 0:2]) * quants + _f16(blocks[:, 2:4])


def _expand_q5_0(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 6:22], 16) | _fifth_bits(blocks[:, 2:6])
    return _f16(blocks[:, 0:2]) * (quants.astype(np.int8) - np.int8(16)).astype(np.float32)


def _expand_q5_1(blocks: Bytes) -> Floats:
    quants = _nibbles(blocks[:, 8:24], 16) | _fifth_bits(blocks[:, 4:8])
    return _f16(blocks[:, 0:2]) * quants.astype(np.float32) + _f16(blocks[:, 2:4])


def _expand_q8_0(blocks: Bytes) -> Floats:
    quants = np.ascontiguousarray(blocks[:, 2:34]).view(np.int8)
    return quants.astype(np.float32) * _f16(blocks[:, 0:2])


def _expand_k_block(blocks: Bytes, quants: Bytes) -> Floats:
    """d·scale·q − dmin·minimum for the eight groups of 32 of a Q4_K or Q5_K block."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = (_f16(blocks[:, 0:2]) * scales)[:, :, None]
    minimum = (_f16(blocks[:, 2:4]) * minima)[:, :, None]
    values: Floats = scale * quants.reshape(-1, 8, 32).astype(np.float32) - minimum
    return values.reshape(-1, 256)


def _expand_q4_k(blocks: Bytes) -> Floats:
    return _expand_k_block(blocks, _nibbles(blocks[:, 16:144], 32))


def _expand_q5_k(blocks: Bytes) -> Floats:
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = ((blocks[:, None, 16:48] >> shifts) & np.uint8(1)) << np.uint8(4)
    return _expand_k_block(blocks, _nibbles(blocks[:, 48:176], 32) | high.reshape(-1, 256))


def _expand_q6_k(blocks: Bytes) -> Floats:
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    quants = _nibbles(blocks[:, 0:128], 64) | (high.reshape(-1, 256) << np.uint8(4))
    signed = (quants.astype(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scale = (_f16(blocks[:, 208:210]) * scales)[:, :, None]
    values: Floats = scale * signed.astype(np.float32)
    return values.reshape(-1, 256)


_EXPANDERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _expand_f32,
    "F16": _expand_f16,
    "BF16": _expand_bf16,
    "Q4_0": _expand_q4_0,
    "Q4_1": _expand_q4_1,
    "Q5_0": _expand_q5_0,
    "Q5_1": _expand_q5_1,
    "Q8_0": _expand_q8_0,
    "Q4_K": _expand_q4_k,
    "Q5_K": _expand_q5_k,
    "Q6_K": _expand_q6_k,
}
