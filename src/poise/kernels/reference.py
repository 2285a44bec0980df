"""The numpy backend: executes each operation at once, on one step, over a paged KV cache.

In mode `exact` it is the bitwise specification of numerics version 1; in mode `f32` it is the plain model, for goldens
and KL. It knows no scheduling: which pages a sequence owns is read from the step's block tables alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from poise.config import Activations, KVCacheDtype
from poise.kernels import reference_exact, reference_float
from poise.kernels import reference_math as math
from poise.kernels.ops import Activation, KVShape, Ops, RopeTable, Step
from poise.kernels.reference_containers import (
    FloatWeights,
    IntegerWeights,
    unpack,
    unpack_vector,
)
from poise.kernels.reference_math import F32
from poise.weights.checkpoint import RawTensor

Mode = Literal["exact", "f32"]


class _Product(Protocol):
    def product(self, a: F32) -> F32: ...


class _Arithmetic(Protocol):
    """What the two modes compute differently."""

    def pack(self, weights: IntegerWeights | FloatWeights) -> _Product: ...
    def norm(self, x: F32, weight: F32, eps: float) -> F32: ...
    def add(self, a: F32, b: F32) -> F32: ...
    def gate(self, g: F32, u: F32, activation: Activation) -> F32: ...
    def rotate(self, x: F32, cosine: F32, sine: F32) -> F32: ...
    def scale_query(self, q: F32, scale: np.float32) -> F32: ...
    def scale(self, x: F32, factor: np.float32) -> F32: ...
    def attend(
        self,
        q: F32,
        keys: F32,
        values: F32,
        positions: NDArray[np.int32],
        window: int | None,
        key_scales: F32 | None,
        value_scales: F32 | None,
    ) -> F32: ...


class _KVFormat(Protocol):
    """How K and V are kept; only int8 values have scales, one per token and head."""

    page_type: type[np.generic]
    scaled: bool

    def to_page(self, x: F32) -> tuple[NDArray[np.generic], F32 | None]: ...
    def from_page(self, page: NDArray[np.generic]) -> F32: ...


class _Float32KV:
    page_type: type[np.generic] = np.float32
    scaled = False

    def to_page(self, x: F32) -> tuple[NDArray[np.generic], F32 | None]:
        return x, None

    def from_page(self, page: NDArray[np.generic]) -> F32:
        return cast(F32, page)


class _Bf16KV:
    page_type: type[np.generic] = np.uint16
    scaled = False

    def to_page(self, x: F32) -> tuple[NDArray[np.generic], F32 | None]:
        return math.to_bf16(x), None

    def from_page(self, page: NDArray[np.generic]) -> F32:
        return math.from_bf16(cast(NDArray[np.uint16], page))


class _Int8KV:
    page_type: type[np.generic] = np.int8
    scaled = True

    def to_page(self, x: F32) -> tuple[NDArray[np.generic], F32 | None]:
        return math.quantise_groups(x)

    def from_page(self, page: NDArray[np.generic]) -> F32:
        return page.astype(np.float32)


KV_FORMATS: dict[KVCacheDtype, type[_KVFormat]] = {"bf16": _Bf16KV, "int8": _Int8KV}


class _Exact:
    norm = staticmethod(math.rms_norm)
    add = staticmethod(math.add)
    scale = staticmethod(math.multiply)
    gate = staticmethod(reference_exact.gate)
    rotate = staticmethod(reference_exact.rotate)
    attend = staticmethod(reference_exact.attend)

    def __init__(self, activations: Activations) -> None:
        self._activations = activations

    def pack(self, weights: IntegerWeights | FloatWeights) -> _Product:
        return reference_exact.pack(weights, self._activations)

    def scale_query(self, q: F32, scale: np.float32) -> F32:
        return math.round_bf16(math.multiply(q, scale))


class _Float32:
    pack = staticmethod(reference_float.Matrix)
    norm = staticmethod(reference_float.rms_norm)
    gate = staticmethod(reference_float.gate)
    rotate = staticmethod(reference_float.rotate)

    def attend(
        self,
        q: F32,
        keys: F32,
        values: F32,
        positions: NDArray[np.int32],
        window: int | None,
        key_scales: F32 | None,
        value_scales: F32 | None,
    ) -> F32:
        assert key_scales is None, "float32 pages have none"
        assert value_scales is None, "float32 pages have none"
        return reference_float.attend(q, keys, values, positions, window)

    @math.quiet
    def add(self, a: F32, b: F32) -> F32:
        return a + b

    @math.quiet
    def scale(self, x: F32, factor: np.float32) -> F32:
        return x * factor

    def scale_query(self, q: F32, scale: np.float32) -> F32:
        return self.scale(q, scale)


class Matrix:
    """A weight matrix [out, in]: rows dequantised on demand for `embed`, packed once for products."""

    def __init__(self, tensor: RawTensor, arithmetic: _Arithmetic) -> None:
        self._tensor = tensor
        self._arithmetic = arithmetic

    def rows(self, numbers: NDArray[np.int32]) -> F32:
        return unpack(self._tensor, numbers).dequantise()

    def product(self, a: F32) -> F32:
        return self._packed.product(a)

    @cached_property
    def _packed(self) -> _Product:
        return self._arithmetic.pack(unpack(self._tensor))


class ReferenceBackend:
    """`Ops`, executed eagerly. Values are float32 arrays [rows, width].

    `pages` [layers of a page, 2 (K, V), blocks, block_size, KV heads, head_dim] holds bf16 bits (uint16) or int8 in mode
    `exact`, as `kv.dtype` says, and float32 in mode `f32`, which rounds no activations either. `scales` are those of int8,
    float32 [layers of a page, 2, blocks, block_size, KV heads].
    """

    def __init__(
        self, kv: KVShape, mode: Mode = "exact", activations: Activations = "int8"
    ) -> None:
        exact = mode == "exact"
        self._arithmetic: _Arithmetic = _Exact(activations) if exact else _Float32()
        self._kv_format: _KVFormat = KV_FORMATS[kv.dtype]() if exact else _Float32KV()
        shape = (kv.num_layers, 2, kv.num_blocks, kv.block_size, kv.num_kv_heads)
        self.pages: NDArray[np.generic] = np.zeros((*shape, kv.head_dim), self._kv_format.page_type)
        self.scales: F32 = np.zeros(shape if self._kv_format.scaled else 0, np.float32)
        self._kv = kv
        self._step: Step | None = None
        self._logits: F32 | None = None

    def run(self, step: Step, forward: Callable[[Ops], None]) -> F32:
        """Executes a model on a step; returns the logits [len(step.logit_rows), vocabulary]."""
        self.begin(step)
        forward(self)
        assert self._logits is not None, "a model ends with ops.logits"
        return self._logits

    def begin(self, step: Step) -> None:
        """Sets the step that the operations called next belong to."""
        assert step.query_start[-1] == len(step.token_ids) == len(step.positions)
        assert len(step.block_tables) == len(step.query_start) - 1
        self._step = step
        self._logits = None

    @property
    def step(self) -> Step:
        assert self._step is not None, "no step has begun"
        return self._step

    def matrix(self, tensor: RawTensor) -> Matrix:
        return Matrix(tensor, self._arithmetic)

    def vector(self, tensor: RawTensor) -> F32:
        return unpack_vector(tensor)

    def embed(self, table: Matrix, scale: float = 1.0) -> F32:
        rows = table.rows(self.step.token_ids)
        return rows if scale == 1.0 else self._arithmetic.scale(rows, np.float32(scale))

    def norm_linear(
        self,
        x: F32,
        norm: F32,
        eps: float,
        weights: Sequence[Matrix],
        biases: Sequence[F32] | None = None,
    ) -> F32:
        normed = self._arithmetic.norm(x, norm, eps)
        outputs = [weight.product(normed) for weight in weights]
        if biases is not None:
            outputs = [self._arithmetic.add(y, b) for y, b in zip(outputs, biases, strict=True)]
        return np.concatenate(outputs, axis=1)

    def rope_kv_write(
        self,
        qkv: F32,
        rope: RopeTable,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: F32 | None = None,
        k_norm: F32 | None = None,
        eps: float = 0.0,
        query_scale: float | None = None,
    ) -> F32:
        arithmetic = self._arithmetic
        heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
        if q_norm is not None:
            q = arithmetic.norm(q, q_norm, eps)
        if k_norm is not None:
            k = arithmetic.norm(k, k_norm, eps)
        positions = self.step.positions.astype(np.float32)[:, np.newaxis, np.newaxis]
        sine, cosine = math.sin_cos(math.multiply(positions, rope.inverse_frequencies))
        q = arithmetic.rotate(q, cosine, sine)
        k = arithmetic.rotate(k, cosine, sine)
        group, place = self._kv.place(layer)
        for part, x in enumerate((k, v)):
            slots = (place, part, *self._slots(group))
            self.pages[slots], scales = self._kv_format.to_page(x)
            if scales is not None:
                self.scales[slots] = scales
        scale = np.float32(head_dim**-0.5 if query_scale is None else query_scale)
        return arithmetic.scale_query(q, scale).reshape(len(qkv), -1)

    def attention(self, q: F32, layer: int, window: int | None = None) -> F32:
        step = self.step
        group, place = self._kv.place(layer)
        heads = q.reshape(len(q), -1, self._kv.head_dim)
        result = np.empty_like(heads)
        for sequence, table in enumerate(self._tables(group)):
            rows = slice(step.query_start[sequence], step.query_start[sequence + 1])
            positions = step.positions[rows]
            if not len(positions):
                continue
            tokens = np.arange(int(positions.max()) + 1)
            slots = table[tokens // self._kv.block_size], tokens % self._kv.block_size
            keys, values = (
                self._kv_format.from_page(self.pages[(place, part, *slots)]) for part in (0, 1)
            )
            scales: tuple[F32 | None, ...] = (None, None)
            if self._kv_format.scaled:
                scales = tuple(self.scales[(place, part, *slots)] for part in (0, 1))
            result[rows] = self._arithmetic.attend(
                heads[rows], keys, values, positions, window, *scales
            )
        return result.reshape(q.shape)

    def fill(self, block: int, byte: int) -> None:
        """Fills a page with a byte, as recycled pages hold anything."""
        self.pages.view(np.uint8)[:, :, block] = byte
        if self._kv_format.scaled:
            self.scales.view(np.uint8)[:, :, block] = byte

    def values_at(self, place: int, block: int, offset: int) -> F32:
        """V [KV heads, head_dim] in a slot of a layer's pages, whatever lies there."""
        values = self._kv_format.from_page(self.pages[place, 1, block, offset])
        if self._kv_format.scaled:
            values = values * self.scales[place, 1, block, offset, :, np.newaxis]
        return values

    def linear_residual(
        self, a: F32, weight: Matrix, x: F32, post_norm: F32 | None = None, eps: float = 0.0
    ) -> F32:
        product = weight.product(a)
        if post_norm is not None:
            product = self._arithmetic.norm(product, post_norm, eps)
        return self._arithmetic.add(x, product)

    def gated_mlp(
        self,
        x: F32,
        norm: F32,
        eps: float,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        activation: Activation = "silu",
        post_norm: F32 | None = None,
    ) -> F32:
        normed = self._arithmetic.norm(x, norm, eps)
        hidden = self._arithmetic.gate(gate.product(normed), up.product(normed), activation)
        return self.linear_residual(hidden, down, x, post_norm, eps)

    def logits(self, x: F32, norm: F32, eps: float, output: Matrix) -> None:
        rows = x[self.step.logit_rows]
        self._logits = output.product(self._arithmetic.norm(rows, norm, eps))

    def _tables(self, group: int) -> NDArray[np.int32]:
        """[sequences, blocks] of one KV group."""
        return np.split(self.step.block_tables, self._kv.num_groups, axis=1)[group]

    def _slots(self, group: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Block and offset of every row of the step."""
        step = self.step
        sequences = np.repeat(np.arange(len(step.block_tables)), np.diff(step.query_start))
        blocks = self._tables(group)[sequences, step.positions // self._kv.block_size]
        return blocks, step.positions % self._kv.block_size
