"""Gemma 3 (text): scaled embeddings, norms before and behind each block, gated GELU, most layers with a sliding window.

Knows the order of operations; which layers have a window, and how far it reaches, is `ModelConfig.windows`.
"""

from __future__ import annotations

from poise.kernels.ops import Ops
from poise.models.config import ModelConfig
from poise.models.rope import rope_table
from poise.models.weights import Source


def record(ops: Ops, config: ModelConfig, source: Source) -> None:
    """Runs (or records) one step of the model; `source` yields each weight's handle by canonical name."""
    assert config.local_rope is not None, "layers with a window have a rope of their own"
    local_rope = config.local_rope
    global_rope_table = source.once("rope", lambda: rope_table(config.rope))
    local_rope_table = source.once("local_rope", lambda: rope_table(local_rope))
    embedding = source.matrix("embed")
    eps = config.rms_norm_eps
    x = ops.embed(embedding, config.embedding_scale)
    for i, window in enumerate(config.windows):
        layer = source.layer(i)
        qkv = ops.norm_linear(
            x,
            layer.vector("attn_norm"),
            eps,
            [layer.matrix("q"), layer.matrix("k"), layer.matrix("v")],
        )
        q = ops.rope_kv_write(
            qkv,
            global_rope_table if window is None else local_rope_table,
            i,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            layer.vector("q_norm"),
            layer.vector("k_norm"),
            eps,
            config.query_scale,
        )
        x = ops.linear_residual(
            ops.attention(q, i, window), layer.matrix("o"), x, layer.vector("attn_post_norm"), eps
        )
        x = ops.gated_mlp(
            x,
            layer.vector("mlp_norm"),
            eps,
            layer.matrix("gate"),
            layer.matrix("up"),
            layer.matrix("down"),
            "gelu_tanh",
            layer.vector("mlp_post_norm"),
        )
    output = embedding if config.tie_word_embeddings else source.matrix("lm_head")
    ops.logits(x, source.vector("norm"), eps, output)
