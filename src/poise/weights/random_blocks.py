"""Random weights in any storage type, made straight as the bytes of a file.

Knows block layouts, not models. Invariant: every value is finite, a matrix has mean about 0 and standard deviation about
1/√columns, and the same seed gives the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poise.weights.dequantize import GGML_TYPES

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Float:
    """A float's layout: the bits kept random (sign and mantissa), where the exponent begins, its bias."""

    word: type[np.unsignedinteger]
    random_bits: int
    exponent_shift: int
    bias: int


_FLOATS = {
    "F32": _Float(np.uint32, 0x807FFFFF, 23, 127),
    "F16": _Float(np.uint16, 0x83FF, 10, 15),
    "BF16": _Float(np.uint16, 0x807F, 7, 127),
}
_MAGNITUDE = math.sqrt(7 / 3)  # root mean square of a number uniform in [1, 2)

# Standard deviation of a block of random bits whose scale is 1, and the f16 fields of a block: (offset, multiple of the
# scale). Minima are chosen so that the mean is 0; those of Q4_K and Q5_K, stored as magnitudes, use the groups' scales.
_LEVELS_16, _LEVELS_32, _LEVELS_64, _LEVELS_256 = (
    math.sqrt((n * n - 1) / 12) for n in (16, 32, 64, 256)
)
_SIX_BITS = math.sqrt(63 * 127 / 6)  # root mean square of 0 … 63
_BLOCKS: dict[str, tuple[float, tuple[tuple[int, float], ...]]] = {
    "Q4_0": (_LEVELS_16, ((0, 1.0),)),
    "Q4_1": (_LEVELS_16, ((0, 1.0), (2, -7.5))),
    "Q5_0": (_LEVELS_32, ((0, 1.0),)),
    "Q5_1": (_LEVELS_32, ((0, 1.0), (2, -15.5))),
    "Q8_0": (_LEVELS_256, ((0, 1.0),)),
    "Q4_K": (_LEVELS_16 * _SIX_BITS, ((0, 1.0), (2, 7.5))),
    "Q5_K": (_LEVELS_32 * _SIX_BITS, ((0, 1.0), (2, 15.5))),
    "Q6_K": (_LEVELS_64 * _LEVELS_256, ((208, 1.0),)),
}


def random_matrix(type_name: str, rows: int, columns: int, seed: int) -> Bytes:
    """uint8 [rows, bytes per row] of a GGML type; `columns` must be whole blocks."""
    ggml_type = GGML_TYPES[type_name]
    assert columns % ggml_type.block_size == 0
    num_bytes = rows * columns // ggml_type.block_size * ggml_type.block_bytes
    words = np.random.SFC64(seed).random_raw(-(-num_bytes // 8))
    data = words.view(np.uint8)[:num_bytes]
    if type_name in _FLOATS:
        _bound_floats(data, _FLOATS[type_name], columns)
    else:
        _set_scales(data.reshape(-1, ggml_type.block_bytes), type_name, columns)
    return data.reshape(rows, -1)


def _bound_floats(data: Bytes, layout: _Float, columns: int) -> None:
    """Leaves sign and mantissa random and gives all numbers one exponent."""
    exponent = round(-math.log2(_MAGNITUDE * math.sqrt(columns))) + layout.bias
    bits = data.view(layout.word)
    bits &= layout.word(layout.random_bits)
    bits |= layout.word(exponent << layout.exponent_shift)


def _set_scales(blocks: Bytes, type_name: str, columns: int) -> None:
    deviation, fields = _BLOCKS[type_name]
    scale = 1 / (deviation * math.sqrt(columns))
    for offset, multiple in fields:
        blocks[:, offset : offset + 2] = np.array([multiple * scale], "<f2").view(np.uint8)
    if type_name in ("Q4_K", "Q5_K"):  # each group's minimum gets the multiple that its scale has
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * np.uint8(17)
