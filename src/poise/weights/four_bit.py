"""A coarser copy of a checkpoint: every matrix in 4 bits (Q4_1), for drafting with the model's own weights.

Knows tensors, not what they are for. Invariant: norms, biases and names are the original's; only matrices are rounded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from poise.models.config import ModelConfig, TokenizerData
from poise.weights.checkpoint import Checkpoint, RawTensor
from poise.weights.dequantize import dequantize

GROUP: Final = 32
LEVELS: Final = 15
ROWS_AT_ONCE: Final = 4096  # bounds the temporaries


class FourBitCheckpoint:
    """Quacks like the checkpoint it is made of."""

    def __init__(self, original: Checkpoint) -> None:
        self._original = original
        self.path: Path = original.path
        self.name = original.name
        self.format = f"{original.format} as Q4_1"
        self.config: ModelConfig = original.config

    @property
    def tokenizer(self) -> TokenizerData:
        return self._original.tokenizer

    def tensor(self, name: str) -> RawTensor:
        """Vectors, and matrices whose rows are no whole groups, are as they were."""
        tensor = self._original.tensor(name)
        if len(tensor.shape) != 2 or tensor.shape[1] % GROUP:
            return tensor
        return four_bit(tensor)

    def has(self, name: str) -> bool:
        return self._original.has(name)

    def release(self) -> None:
        self._original.release()

    def weight_bytes(self) -> int:
        return self._original.weight_bytes()

    def digest(self) -> str:
        return self._original.digest()


def four_bit(tensor: RawTensor) -> RawTensor:
    """A matrix as Q4_1, its rows stored in the same order."""
    stored = replace(tensor, row_order=None)
    num_rows, num_columns = tensor.shape
    data = np.empty((num_rows, num_columns // GROUP * 20), np.uint8)
    for begin in range(0, num_rows, ROWS_AT_ONCE):
        rows = slice(begin, min(begin + ROWS_AT_ONCE, num_rows))
        part = replace(
            stored,
            shape=(rows.stop - begin, num_columns),
            data=np.ascontiguousarray(stored.data[rows]),
        )
        data[rows] = quantize(dequantize(part))
    return replace(tensor, type="Q4_1", data=data)


def quantize(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 [rows, columns] to Q4_1 [rows, columns / 32 · 20]: per group an f16 scale and minimum, then 32 nibbles,
    each value's nearest level between the group's smallest and largest.
    """
    groups = values.reshape(-1, GROUP)
    low, high = groups.min(axis=1), groups.max(axis=1)
    scale, minimum = ((high - low) / LEVELS).astype(np.float16), low.astype(np.float16)
    step = scale.astype(np.float32)[:, np.newaxis]
    above = groups - minimum.astype(np.float32)[:, np.newaxis]
    levels = np.divide(above, step, out=np.zeros_like(groups), where=step > 0)
    nibbles = np.clip(np.rint(levels), 0, LEVELS).astype(np.uint8)
    blocks = np.empty((len(groups), 20), np.uint8)
    blocks[:, 0:2] = scale.view(np.uint8).reshape(-1, 2)
    blocks[:, 2:4] = minimum.view(np.uint8).reshape(-1, 2)
    blocks[:, 4:] = nibbles[:, :16] | nibbles[:, 16:] << 4
    return blocks.reshape(len(values), -1)
