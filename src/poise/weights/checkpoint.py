"""What any checkpoint, GGUF or safetensors, offers to the model builder.

Canonical tensor names (layer i): `embed`, `norm`, `lm_head`, `layers.{i}.` + `attn_norm q k v q_bias k_bias v_bias q_norm k_norm o
attn_post_norm mlp_norm gate up down mlp_post_norm`. Matrices are [out, in]: row n holds the K weights of output n.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from poise.models.config import ModelConfig, TokenizerData


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it lies in its file.

    `type` is a GGML type name (F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K). `shape` counts elements: (n,) or (rows, columns).
    `data` is uint8 [rows, bytes per row] (one row for a vector), C-contiguous, usually a view of the file's map.
    `row_order`, where given, is int32 [rows]: logical row r is stored row row_order[r] (the q/k permutation of GGUF llama files undone).
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    row_order: NDArray[np.int32] | None = None


class Checkpoint(Protocol):
    """An opened model: configuration, tokenizer data, tensors by canonical name."""

    path: Path
    name: str
    format: str  # for people: "GGUF Q4_1", "safetensors BF16"
    config: ModelConfig

    @property
    def tokenizer(self) -> TokenizerData:
        """Decoded on first use."""
        ...

    def tensor(self, name: str) -> RawTensor:
        """The tensor of that canonical name; ModelFileError if the file lacks it."""
        ...

    def has(self, name: str) -> bool: ...

    def release(self) -> None:
        """Lets the system take back the memory of what was read; reading it again costs time only."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    def digest(self) -> str:
        """sha256 (hex) that identifies the content; cached beside the model cache by (path, size, mtime)."""
        ...
