"""A tiny random llama for tests of a backend: mixed containers, and a forward function over `Ops`."""

from __future__ import annotations

from dataclasses import dataclass, field

import gguf
import numpy as np

from poise.kernels.ops import KVShape, Ops, RopeTable, Step
from poise.weights.checkpoint import RawTensor

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 2, 16, 64, 96, 128
LAYERS = 2
EPS = 1e-5
ROPE = RopeTable((1 / 10000 ** (np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)).astype(np.float32))


def raw(values, type_name="F32", name="weight"):
    """Values [rows, columns] or [n] in the given block format."""
    values = np.asarray(values, np.float32)
    kind = gguf.GGMLQuantizationType[type_name]
    data = gguf.quantize(np.atleast_2d(values), kind).view(np.uint8)
    return RawTensor(name, type_name, values.shape, np.ascontiguousarray(data))


@dataclass
class TinyLlama:
    """Tensors by canonical name; `types` are used in turn for the matrices."""

    types: tuple[str, ...] = ("Q4_1", "Q8_0", "BF16", "Q5_0", "F16", "F32", "Q4_0")
    seed: int = 0
    tensors: dict[str, RawTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        matrices = {"embed": (VOCABULARY, HIDDEN)}
        for layer in range(LAYERS):
            matrices |= {
                f"{layer}.q": (HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.k": (KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.v": (KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.o": (HIDDEN, HEADS * HEAD_DIM),
                f"{layer}.gate": (INTERMEDIATE, HIDDEN),
                f"{layer}.up": (INTERMEDIATE, HIDDEN),
                f"{layer}.down": (HIDDEN, INTERMEDIATE),
            }
        for index, (name, shape) in enumerate(matrices.items()):
            values = rng.normal(0, 2 / shape[1] ** 0.5, shape)
            self.tensors[name] = raw(values, self.types[index % len(self.types)], name)

    def build(self, ops: Ops):
        """A forward function with its weights, for `ReferenceBackend.run`."""
        weights = {name: ops.matrix(tensor) for name, tensor in self.tensors.items()}
        norm = ops.vector(raw(np.linspace(0.5, 1.5, HIDDEN)))

        def forward(ops: Ops) -> None:
            x = ops.embed(weights["embed"])
            for layer in range(LAYERS):
                q, k, v, o, gate, up, down = (
                    weights[f"{layer}.{name}"]
                    for name in ("q", "k", "v", "o", "gate", "up", "down")
                )
                qkv = ops.norm_linear(x, norm, EPS, [q, k, v])
                q = ops.rope_kv_write(qkv, ROPE, layer, HEADS, KV_HEADS, HEAD_DIM)
                x = ops.linear_residual(ops.attention(q, layer), o, x)
                x = ops.gated_mlp(x, norm, EPS, gate, up, down)
            ops.logits(x, norm, EPS, weights["embed"])

        return forward


def kv_shape(num_blocks: int, block_size: int) -> KVShape:
    return KVShape(LAYERS, KV_HEADS, HEAD_DIM, block_size, num_blocks)


def step(parts: list[tuple[np.ndarray, int, np.ndarray]]) -> Step:
    """A step of sequences (token ids, first position, block table) that wants every row's logits."""
    rows = [len(ids) for ids, _, _ in parts]
    width = max(len(table) for _, _, table in parts)
    tables = [np.pad(table, (0, width - len(table))) for _, _, table in parts]
    positions = [np.arange(first, first + len(ids)) for ids, first, _ in parts]
    return Step(
        token_ids=np.concatenate([ids for ids, _, _ in parts]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_start=np.cumsum([0, *rows]).astype(np.int32),
        block_tables=np.array(tables, np.int32),
        logit_rows=np.arange(sum(rows), dtype=np.int32),
    )
