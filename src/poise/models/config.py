"""What the engine knows of a model's shape, whatever file it came from.

Invariant: a `ModelConfig` describes a model that some file in `models/` can build; anything unknown was refused before.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: f_i = 1/theta^(2i/dim), divided by `factors[i]` (Llama 3, linear) where given."""

    theta: float
    dim: int
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer. Sizes in elements, counts as named."""

    architecture: str  # llama, qwen2, qwen3, gemma3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # a norm between attention, MLP and what they add to
    embedding_scale: float = 1.0
    query_scale: float | None = None  # of attention scores; None: head_dim^-1/2
    windows: tuple[
        int | None, ...
    ] = ()  # by layer, how many positions a row sees; None: all; (): all layers all
    local_rope: RopeConfig | None = None  # of layers with a window


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """What a checkpoint says of its tokenizer: exactly one of the two sources, and the ids that matter.

    `tokenizer_json` is the text of tokenizer.json; `gguf` holds the file's `tokenizer.*` metadata by full key.
    `eos_token_ids` joins every end-of-turn id that the files name (generation_config, tokenizer, GGUF eos/eot/eom).
    """

    tokenizer_json: str | None = None
    gguf: dict[str, object] = field(default_factory=dict)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos_token: bool = False
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(
        default_factory=dict
    )  # bos_token, eos_token, … for templates
