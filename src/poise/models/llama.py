"""Llama and everything of its shape: Llama 2 and 3, SmolLM2, Mistral without a window.

Knows the order of operations; knows nothing of batches, pages or containers.
"""

from __future__ import annotations

from poise.kernels.ops import Ops
from poise.models.config import ModelConfig
from poise.models.rope import rope_table
from poise.models.weights import Source


def record(ops: Ops, config: ModelConfig, source: Source) -> None:
    """Runs (or records) one step of the model; `source` yields each weight's handle by canonical name."""
    rope = source.once("rope", lambda: rope_table(config.rope))
    embedding = source.matrix("embed")
    x = ops.embed(embedding)
    for i in range(config.num_layers):
        layer = source.layer(i)
        qkv = ops.norm_linear(
            x,
            layer.vector("attn_norm"),
            config.rms_norm_eps,
            [layer.matrix("q"), layer.matrix("k"), layer.matrix("v")],
            [layer.vector(f"{name}_bias") for name in "qkv"] if config.qkv_bias else None,
        )
        q = ops.rope_kv_write(
            qkv,
            rope,
            i,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            layer.vector("q_norm") if config.qk_norm else None,
            layer.vector("k_norm") if config.qk_norm else None,
            config.rms_norm_eps,
        )
        x = ops.linear_residual(ops.attention(q, i), layer.matrix("o"), x)
        x = ops.gated_mlp(
            x,
            layer.vector("mlp_norm"),
            config.rms_norm_eps,
            layer.matrix("gate"),
            layer.matrix("up"),
            layer.matrix("down"),
        )
    output = embedding if config.tie_word_embeddings else source.matrix("lm_head")
    ops.logits(x, source.vector("norm"), config.rms_norm_eps, output)
