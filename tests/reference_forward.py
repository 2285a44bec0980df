"""A decoder-only transformer over `Ops`, straight from a checkpoint: for tests of backends, independent of `poise.models`."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import numpy as np

from poise.kernels.ops import KVShape, Ops, RopeTable, Step
from poise.models.config import ModelConfig, RopeConfig
from poise.weights.checkpoint import Checkpoint


def rope_table(rope: RopeConfig) -> RopeTable:
    """1/theta^(2i/dim) in decimal arithmetic, rounded once, then divided by the pair's factor."""
    theta = Decimal(rope.theta)
    exact = [1 / theta ** (Decimal(2 * i) / rope.dim) for i in range(rope.dim // 2)]
    frequencies = np.array([float(value) for value in exact], np.float32)
    if rope.factors is not None:
        frequencies = frequencies / np.array(rope.factors, np.float32)
    return RopeTable(frequencies)


def kv_shape(config: ModelConfig, num_tokens: int, block_size: int = 16) -> KVShape:
    blocks = -(-num_tokens // block_size)
    return KVShape(config.num_layers, config.num_kv_heads, config.head_dim, block_size, blocks)


def build(ops: Ops, checkpoint: Checkpoint) -> Callable[[Ops], None]:
    """Packs the weights; returns the forward function."""
    config = checkpoint.config
    rope = rope_table(config.rope)
    embed = ops.matrix(checkpoint.tensor("embed"))
    output = embed if config.tie_word_embeddings else ops.matrix(checkpoint.tensor("lm_head"))
    norm = ops.vector(checkpoint.tensor("norm"))
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    eps = config.rms_norm_eps
    matrices, vectors = [], []
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        matrices.append(
            {
                name: ops.matrix(checkpoint.tensor(prefix + name))
                for name in ("q", "k", "v", "o", "gate", "up", "down")
            }
        )
        names = ["attn_norm", "mlp_norm"]
        names += ["q_bias", "k_bias", "v_bias"] if config.qkv_bias else []
        names += ["q_norm", "k_norm"] if config.qk_norm else []
        vectors.append({name: ops.vector(checkpoint.tensor(prefix + name)) for name in names})

    def forward(ops: Ops) -> None:
        x = ops.embed(embed)
        for layer, (weights, vector) in enumerate(zip(matrices, vectors)):
            projections = [weights["q"], weights["k"], weights["v"]]
            biases = [vector[f"{name}_bias"] for name in "qkv"] if config.qkv_bias else None
            qkv = ops.norm_linear(x, vector["attn_norm"], eps, projections, biases)
            norms = vector.get("q_norm"), vector.get("k_norm"), eps
            q = ops.rope_kv_write(qkv, rope, layer, *heads, *norms)
            x = ops.linear_residual(ops.attention(q, layer), weights["o"], x)
            mlp = weights["gate"], weights["up"], weights["down"]
            x = ops.gated_mlp(x, vector["mlp_norm"], eps, *mlp)
        ops.logits(x, norm, eps, output)

    return forward


def one_sequence(token_ids, first: int = 0, wanted=None, num_blocks: int = 32) -> Step:
    """The step of one sequence in blocks 0, 1, …; `wanted` are the rows whose logits are wanted, by default all."""
    rows = len(token_ids)
    return Step(
        token_ids=np.asarray(token_ids, np.int32),
        positions=np.arange(first, first + rows, dtype=np.int32),
        query_start=np.array([0, rows], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[np.newaxis],
        logit_rows=np.asarray(range(rows) if wanted is None else wanted, np.int32),
    )
