"""Records a model into a native plan: the `Ops` of the CPU.

A value is the index of a float32 buffer; buffers are shared by role and width, since a layer's outputs die with the
layer. Invariant: recording changes nothing but the plan; `run` replays it for any batch up to `max_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.config import Activations
from poise.kernels.cpu import isa, native
from poise.kernels.cpu.recorded import RecordedOperation
from poise.kernels.ops import LOGIT_TILE, Activation, KVShape, RopeTable, Step
from poise.weights.checkpoint import RawTensor
from poise.weights.dequantize import dequantize


class CPUBackend:
    """`Ops` over one native plan, with its pool, weight arena and KV pages."""

    def __init__(
        self,
        kv: KVShape,
        *,
        max_rows: int,
        threads: int,
        activations: Activations = "int8",
        share_prefixes: bool = True,
        variant: str | None = None,
        pool: native.Pool | None = None,
        pages: native.Pages | None = None,
    ) -> None:
        """`pages` of another backend of the same `kv`: its plan and this one read and write the same KV."""
        self._activations = activations
        self.variant = variant or isa()
        self.pool = pool or native.Pool(threads)
        self.arena = native.Arena()
        self.pages = pages or native.Pages(
            kv.num_layers, kv.num_kv_heads, kv.head_dim, kv.block_size, kv.num_blocks, kv.dtype
        )
        self.plan = native.Plan(self.pool, self.variant, max_rows, LOGIT_TILE, self.pages)
        self.plan.share_prefixes = share_prefixes
        self._kv = kv
        self.operations: list[RecordedOperation] = []  # in recording order
        self._bytes_per_key = self.pages.page_bytes // (kv.num_layers * kv.block_size)
        self._buffers: dict[tuple[str, int], int] = {}
        self._heads: dict[int, tuple[int, int]] = {}  # by q buffer
        self._frequencies: dict[int, tuple[RopeTable, object]] = {}

    def _buffer(self, role: str, width: int) -> int:
        key = (role, width)
        if key not in self._buffers:
            self._buffers[key] = self.plan.buffer(width)
        return self._buffers[key]

    def _record(self, name: str, *matrices: Any) -> None:
        self.operations.append(
            RecordedOperation(
                name,
                weight_bytes=sum(w.nbytes for w in matrices),
                flops_per_row=sum(2 * w.rows * w.cols for w in matrices),
            )
        )

    def matrix(self, tensor: RawTensor) -> object:
        """Packs a matrix on all workers. Raises ValueError where the type has no container."""
        return native.pack(
            self.pool,
            self.arena,
            tensor.type,
            tensor.data,
            tensor.shape[1],
            tensor.row_order,
            self._activations,
        )

    def vector(self, tensor: RawTensor) -> object:
        return self._vector(dequantize(tensor).reshape(-1))

    def _vector(self, values: NDArray[np.float32]) -> object:
        return native.vector(self.arena, np.ascontiguousarray(values, dtype=np.float32))

    def embed(self, table: object, scale: float = 1.0) -> int:
        x = self._buffer("x", table.cols)  # type: ignore[attr-defined]
        self.plan.embed(table, scale, x)
        row_bytes = table.nbytes // table.rows  # type: ignore[attr-defined]
        self.operations.append(RecordedOperation("embed", weight_bytes=row_bytes))
        return x

    def norm_linear(
        self,
        x: int,
        norm: object,
        eps: float,
        weights: Sequence[object],
        biases: Sequence[object] | None = None,
    ) -> int:
        out = self._buffer("linear", sum(w.rows for w in weights))  # type: ignore[attr-defined]
        self.plan.norm_linear(x, norm, eps, list(weights), list(biases or ()), out)
        self._record("norm_linear", *weights)
        return out

    def rope_kv_write(
        self,
        qkv: int,
        rope: RopeTable,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: object | None = None,
        k_norm: object | None = None,
        eps: float = 0.0,
        query_scale: float | None = None,
    ) -> int:
        if id(rope) not in self._frequencies:
            self._frequencies[id(rope)] = (rope, self._vector(rope.inverse_frequencies))
        frequencies = self._frequencies[id(rope)][1]
        out = self._buffer("q", num_heads * head_dim // 2)  # bf16, two to a float
        self._heads[out] = (num_heads, head_dim)
        scale = float(np.float32(head_dim**-0.5 if query_scale is None else query_scale))
        group, place = self._kv.place(layer)
        self.plan.rope_kv_write(
            qkv, frequencies, place, num_heads, q_norm, k_norm, eps, scale, out, group
        )
        self._record("rope_kv_write")
        return out

    def attention(self, q: int, layer: int, window: int | None = None) -> int:
        num_heads, head_dim = self._heads[q]
        out = self._buffer("attention", num_heads * head_dim)
        group, place = self._kv.place(layer)
        self.plan.attention(q, place, num_heads, out, group, window or 0)
        self.operations.append(
            RecordedOperation(
                "attention",
                bytes_per_key=self._bytes_per_key,
                flops_per_key=4 * num_heads * head_dim,
                window=window,
                kv_group=group,
            )
        )
        return out

    def linear_residual(
        self, a: int, weight: object, x: int, post_norm: object | None = None, eps: float = 0.0
    ) -> int:
        self.plan.linear_residual(a, weight, x, post_norm, eps, self._product(post_norm))
        self._record("linear_residual", weight)
        return x

    def gated_mlp(
        self,
        x: int,
        norm: object,
        eps: float,
        gate: object,
        up: object,
        down: object,
        activation: Activation = "silu",
        post_norm: object | None = None,
    ) -> int:
        gelu, product = activation == "gelu_tanh", self._product(post_norm)
        self.plan.gated_mlp(x, norm, eps, gate, up, down, gelu, post_norm, product)
        self._record("gated_mlp", gate, up, down)
        return x

    def _product(self, post_norm: object | None) -> int:
        """The buffer between a product and its norm, -1 where there is none."""
        return -1 if post_norm is None else self._buffer("product", post_norm.size)  # type: ignore[attr-defined]

    def logits(self, x: int, norm: object, eps: float, output: object) -> None:
        self.plan.logits(x, norm, eps, output)
        self._record("logits", output)
        for index in range(self.plan.first_of_wanted, len(self.operations)):
            self.operations[index] = replace(self.operations[index], wanted_only=True)

    @property
    def kv(self) -> KVShape:
        """How KV lies in the pages."""
        return self._kv

    @property
    def share_prefixes(self) -> bool:
        """Whether attention reads the splits that lie on the same blocks in several sequences once for all of them."""
        return self.plan.share_prefixes

    @property
    def spared_keys(self) -> list[int]:
        """By KV group: keys that sequences of the last run did not read for themselves, as another's pass served them."""
        return self.plan.spared_keys

    def run(
        self,
        step: Step,
        sampling: NDArray[np.uint8] | None = None,
        results: NDArray[np.uint8] | None = None,
        logits: NDArray[np.float32] | None = None,
    ) -> None:
        """Replays the plan. `sampling`, `results`: bytes of one record per logit row; `logits`: float32 [rows, vocabulary] to fill.

        Raises ValueError for a token, position or block out of range.
        """
        self.plan.run(
            step.token_ids,
            step.positions,
            step.query_start,
            step.block_tables,
            step.logit_rows,
            sampling,
            results,
            logits,
        )
