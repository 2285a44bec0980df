"""The vocabulary of operations, and the step that they run on.

A model is a function over `Ops`; a backend either executes an operation at once (the numpy reference) or records it
into a plan that is replayed every step (the CPU backend). `docs/NUMERICS.md` fixes each operation to the bit.
Activations are float32 arrays [rows, width]; a value is an opaque handle of the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from poise.config import KVCacheDtype
from poise.weights.checkpoint import RawTensor

KEY_BLOCK = 64  # keys per softmax update
SPLIT = 256  # positions per attention split
LOGIT_TILE = 32  # rows of logits that exist at once

Activation = Literal["silu", "gelu_tanh"]

Handle = Any


@dataclass(frozen=True, slots=True)
class RopeTable:
    """`inverse_frequencies` float32 [dim/2]; dimensions past `2 * len` of a head pass unchanged."""

    inverse_frequencies: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one model: pages of `block_size` tokens × `num_layers` layers of one KV group.

    `places` gives the KV group and the place in its pages of each layer of the model; empty: one group, layers in order.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    places: tuple[tuple[int, int], ...] = ()
    dtype: KVCacheDtype = "bf16"

    @property
    def num_groups(self) -> int:
        return 1 + max((group for group, _ in self.places), default=0)

    def place(self, layer: int) -> tuple[int, int]:
        return self.places[layer] if self.places else (0, layer)


@dataclass(slots=True)
class Step:
    """Rows of one step, grouped by sequence (a request scheduled in this step), in position order within each.

    token_ids, positions: int32 [rows]. query_start: int32 [sequences + 1], rows of sequence s are
    query_start[s] … query_start[s+1]-1. block_tables: int32 [sequences, groups · blocks], the tables of the KV groups side
    by side; blocks behind a group's window are never looked at. logit_rows: int32 [n], ascending row numbers whose logits
    are wanted.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    query_start: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    logit_rows: NDArray[np.int32]


class Ops(Protocol):
    """Operations in the order a decoder-only transformer uses them."""

    def matrix(self, tensor: RawTensor) -> Handle:
        """Packs a matrix [out, in] into its container."""
        ...

    def vector(self, tensor: RawTensor) -> Handle:
        """A float32 vector."""
        ...

    def embed(self, table: Handle, scale: float = 1.0) -> Handle:
        """x[row] = dequantised table row of the row's token id, times `scale` where that is not 1."""
        ...

    def norm_linear(
        self,
        x: Handle,
        norm: Handle,
        eps: float,
        weights: Sequence[Handle],
        biases: Sequence[Handle] | None = None,
    ) -> Handle:
        """RMS norm, then each matrix on the same normed rows; outputs side by side (q | k | v)."""
        ...

    def rope_kv_write(
        self,
        qkv: Handle,
        rope: RopeTable,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: Handle | None = None,
        k_norm: Handle | None = None,
        eps: float = 0.0,
        query_scale: float | None = None,
    ) -> Handle:
        """Optional per-head norm, rope on q and k, K and V rounded into the pages; returns q in bf16, times
        `query_scale` (None: head_dim^-1/2).
        """
        ...

    def attention(self, q: Handle, layer: int, window: int | None = None) -> Handle:
        """Causal attention over the pages; float32 [rows, heads * head_dim].

        With a `window` the row at position p sees positions p - window + 1 … p; all layers of a KV group share it.
        """
        ...

    def linear_residual(
        self,
        a: Handle,
        weight: Handle,
        x: Handle,
        post_norm: Handle | None = None,
        eps: float = 0.0,
    ) -> Handle:
        """x + weight · a, or x + the RMS norm of weight · a."""
        ...

    def gated_mlp(
        self,
        x: Handle,
        norm: Handle,
        eps: float,
        gate: Handle,
        up: Handle,
        down: Handle,
        activation: Activation = "silu",
        post_norm: Handle | None = None,
    ) -> Handle:
        """x + down · (activation(gate · n) · (up · n)), n the RMS norm of x; with a `post_norm` x + the RMS norm of that."""
        ...

    def logits(self, x: Handle, norm: Handle, eps: float, output: Handle) -> None:
        """Norm and output matrix for the rows in `Step.logit_rows`; ends the model."""
        ...
