"""A GGUF file as a checkpoint: metadata to configuration, tensor names to canonical ones, q/k order
undone.

Knows the architectures llama, qwen2, qwen3 and gemma3. Invariant: metadata that would change the answer and
is not understood is refused by name; nothing is accepted and ignored.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from poise.errors import ModelFileError
from poise.models.config import ModelConfig, RopeConfig, TokenizerData
from poise.weights.cache import file_digest
from poise.weights.checkpoint import RawTensor
from poise.weights.gguf import ArrayField, GGUFFile, TensorEntry
from poise.weights.mapped_checkpoint import MappedCheckpoint, check_config, check_tensors

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

_TOP_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
}
_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_ROPE_FREQS = "rope_freqs.weight"

# Keys (after the architecture) of features that no model here has, with the values that switch them
# off.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
}
# A file with fewer tensors than layers fails at its first gap, so this many are enough to look at.
MAX_LAYERS = 1 << 12
# Ends of a turn by their spelling: files that name only the end of text have these too.
_TURN_ENDS = ("<end_of_turn>",)
CONTROL = 3  # in tokenizer.ggml.token_type
_BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe")  # pre-tokenisers whose models expect a BOS


class GGUFCheckpoint(MappedCheckpoint):
    """An opened GGUF model. Raises ModelFileError naming file and field."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        metadata = _Metadata(self._file)
        config = _model_config(metadata)
        check_config(path, config)
        rename = file_names(config.num_layers)
        tensors = _canonical_tensors(self._file, config, rename)
        check_tensors(path, config, tensors, rename)
        metadata.check_token_count(config.vocab_size)
        super().__init__(path, "GGUF", config, tensors, [self._file.map])

    @cached_property
    def tokenizer(self) -> TokenizerData:
        """The `tokenizer.*` metadata, decoded on first use."""
        return _tokenizer_data(self._file, self.config.vocab_size)

    def digest(self) -> str:
        """sha256 of the file."""
        return file_digest(self.path)


class _Metadata:
    """Typed, checked access to metadata of one architecture; every failure names file and key."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ModelFileError(
                f"{file.path}: 'general.architecture' is {architecture!r}, which is not supported "
                f"(supported: {', '.join(ARCHITECTURES)})"
            )
        self.architecture = str(architecture)

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.file.path}: '{self.architecture}.{key}' {problem}")

    def get(self, key: str) -> object:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; required where there is no default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, ArrayField):
            self.fail(key, "differs by layer, which is not supported")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(key, f"is {value!r}; a positive whole number is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number; required where there is no default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            self.fail(key, f"is {value!r}; a positive number is needed")
        return float(value)

    def check_neutral(self, context: int) -> None:
        """Refuses features that would change the answer."""
        for key, neutral in _NEUTRAL.items():
            value = self.get(key)
            if value is not None and value not in neutral:
                self.fail(key, f"is {value!r}, a feature that is not supported")
        window = self.get("attention.sliding_window")
        if (
            self.architecture != "gemma3"
            and window
            and not (isinstance(window, int) and window >= context)
        ):
            self.fail(
                "attention.sliding_window", f"is {window!r}; sliding windows are not supported"
            )

    def check_token_count(self, vocab_size: int) -> None:
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, ArrayField) and tokens.count > vocab_size:
            raise ModelFileError(
                f"{self.file.path}: 'tokenizer.ggml.tokens' has {tokens.count} tokens, "
                f"but the embedding has {vocab_size} rows"
            )


def _model_config(metadata: _Metadata) -> ModelConfig:
    tensors = metadata.file.tensors
    embedding = tensors.get(_TOP_NAMES["embed"])
    if embedding is None or len(embedding.dimensions) != 2:
        raise ModelFileError(f"{metadata.file.path}: matrix 'token_embd.weight' is missing")
    hidden_size = metadata.count("embedding_length")
    num_heads = metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", max(hidden_size // num_heads, 1))
    if metadata.count("attention.value_length", head_dim) != head_dim:
        metadata.fail("attention.value_length", f"is not the key length, {head_dim}")
    context = metadata.count("context_length")
    metadata.check_neutral(context)
    gemma3 = _gemma3_settings(metadata, hidden_size, num_heads, head_dim)
    return ModelConfig(
        architecture=metadata.architecture,
        vocab_size=embedding.dimensions[1],
        hidden_size=hidden_size,
        intermediate_size=metadata.count("feed_forward_length"),
        num_layers=metadata.count("block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=metadata.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context,
        rope=_rope_config(metadata, head_dim),
        tie_word_embeddings=_TOP_NAMES["lm_head"] not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=metadata.architecture in ("qwen3", "gemma3"),
        **gemma3,
    )


def _gemma3_settings(
    metadata: _Metadata, hidden_size: int, num_heads: int, head_dim: int
) -> dict[str, Any]:
    """What a `ModelConfig` says of Gemma 3 alone; nothing for other architectures.

    As llama.cpp reads these files: every 6th layer sees everything, unless the file says otherwise;
    scores scale by head_dim^-1/2, in the model of 62 layers (27B) by (hidden size / heads)^-1/2.
    """
    if metadata.architecture != "gemma3":
        return {}
    num_layers = metadata.count("block_count")
    query_width = hidden_size / num_heads if num_layers == 62 else head_dim
    return {
        "post_norms": True,
        "embedding_scale": float(np.float32(math.sqrt(hidden_size))),
        "query_scale": query_width**-0.5,
        "windows": _windows(metadata, num_layers),
        "local_rope": RopeConfig(metadata.number("rope.freq_base_swa", 10000.0), head_dim),
    }


def _windows(metadata: _Metadata, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, None for those that see everything."""
    window = min(metadata.count("attention.sliding_window"), metadata.count("context_length"))
    key = "attention.sliding_window_pattern"
    pattern = metadata.get(key)
    if isinstance(pattern, ArrayField):
        slides = [flag is True for flag in metadata.file.array(pattern)]
        if len(slides) != num_layers:
            metadata.fail(key, f"has {len(slides)} entries for {num_layers} layers")
    else:
        period = metadata.count(key, 6)
        slides = [(layer + 1) % period != 0 for layer in range(min(num_layers, MAX_LAYERS))]
    return tuple(window if slide else None for slide in slides)


def _rope_config(metadata: _Metadata, head_dim: int) -> RopeConfig:
    dim = metadata.count("rope.dimension_count", head_dim)
    scaling = metadata.get("rope.scaling.type")
    linear = 1.0
    if scaling == "linear":
        linear = metadata.number("rope.scaling.factor")
    elif scaling not in (None, "none"):
        metadata.fail("rope.scaling.type", f"is {scaling!r}, which is not supported")
    elif metadata.get("rope.scale_linear") is not None:
        linear = metadata.number("rope.scale_linear")
    factors = _rope_factors(metadata.file, dim)
    if linear != 1.0:
        factors = tuple(linear * factor for factor in factors or (1.0,) * (dim // 2))
    return RopeConfig(metadata.number("rope.freq_base", 10000.0), dim, factors)


def _rope_factors(file: GGUFFile, dim: int) -> tuple[float, ...] | None:
    """Llama 3's frequency factors, which GGUF keeps as a tensor."""
    entry = file.tensors.get(_ROPE_FREQS)
    if entry is None:
        return None
    if entry.type.name != "F32" or entry.dimensions != (dim // 2,):
        raise ModelFileError(
            f"{file.path}: tensor {_ROPE_FREQS!r} is not F32 of {dim // 2} elements"
        )
    factors = file.data(entry).view(np.float32)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFileError(
            f"{file.path}: tensor {_ROPE_FREQS!r} holds a factor that is not positive"
        )
    return tuple(factors.tolist())


def file_names(num_layers: int) -> dict[str, str]:
    """Canonical name to GGUF name."""
    names = dict(_TOP_NAMES)
    for index in range(min(num_layers, MAX_LAYERS)):
        for canonical, name in _LAYER_NAMES.items():
            names[f"layers.{index}.{canonical}"] = f"blk.{index}.{name}"
    return names


def _canonical_tensors(
    file: GGUFFile, config: ModelConfig, rename: dict[str, str]
) -> dict[str, RawTensor]:
    canonical = {name: key for key, name in rename.items()}
    tensors: dict[str, RawTensor] = {}
    for entry in file.tensors.values():
        if entry.name == _ROPE_FREQS:
            continue  # read into RopeConfig.factors
        # A name that nothing maps keeps its own, and check_tensors refuses it.
        name = canonical.get(entry.name, entry.name)
        tensors[name] = _raw_tensor(file, config, name, entry)
    return tensors


def _raw_tensor(file: GGUFFile, config: ModelConfig, name: str, entry: TensorEntry) -> RawTensor:
    columns, *outer = entry.dimensions
    rows = math.prod(outer)
    shape = (*reversed(outer), columns)
    data = file.data(entry).reshape(rows, -1)
    kind = name.rpartition(".")[2]
    if config.architecture == "llama" and kind in ("q", "k", "q_bias", "k_bias"):
        num_heads = config.num_heads if kind[0] == "q" else config.num_kv_heads
        if shape[0] == num_heads * config.head_dim:  # else check_tensors refuses the shape
            order = rotary_row_order(num_heads, config.head_dim)
            if len(shape) == 2:
                return RawTensor(entry.name, entry.type.name, shape, data, order)
            # A vector is one stored row, so its elements are put in order here.
            if entry.type.block_size != 1:
                raise ModelFileError(
                    f"{file.path}: type of tensor {entry.name!r} is {entry.type.name}, not a float"
                )
            data = data.reshape(columns, -1)[order].reshape(1, -1)
    return RawTensor(entry.name, entry.type.name, shape, data)


def rotary_row_order(num_heads: int, head_dim: int) -> NDArray[np.int32]:
    """int32 [num_heads · head_dim]: the stored row of each logical row of a llama q or k matrix.

    The converter stores reshape(heads, 2, d/2, K).swapaxes(1, 2): row (half, j) of a head lies at
    2j + half.
    """
    stored = np.arange(num_heads * head_dim, dtype=np.int32)
    return stored.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _tokenizer_data(file: GGUFFile, vocab_size: int) -> TokenizerData:
    values: dict[str, object] = {}
    for key, value in file.metadata.items():
        if key.startswith("tokenizer."):
            values[key] = file.array(value) if isinstance(value, ArrayField) else value
    ids = {
        role: _token_id(file, role, vocab_size)
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    tokens = values.get("tokenizer.ggml.tokens")
    special = {
        "bos": "bos_token",
        "eos": "eos_token",
        "unknown": "unk_token",
        "padding": "pad_token",
    }
    add_bos = values.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        model, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
        add_bos = model == "llama" or pre in _BOS_BY_DEFAULT
    template = values.get("tokenizer.chat_template")
    ends = [ids[role] for role in ("eos", "eot", "eom")]
    ends += [_control_token(values, text) for text in _TURN_ENDS]
    return TokenizerData(
        gguf=values,
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
        add_bos_token=bool(add_bos) and ids["bos"] is not None,
        chat_template=template if isinstance(template, str) else None,
        special_tokens={
            label: str(tokens[token])
            for role, label in special.items()
            if (token := ids[role]) is not None and isinstance(tokens, list) and token < len(tokens)
        },
    )


def _control_token(values: dict[str, object], text: str) -> int | None:
    """The id of the control token that is spelled so, if there is one."""
    tokens, types = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(types, list) or text not in tokens:
        return None
    token_id = tokens.index(text)
    return token_id if types[token_id : token_id + 1] == [CONTROL] else None


def _token_id(file: GGUFFile, role: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    value = file.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise ModelFileError(f"{file.path}: {key!r} is {value!r}, not an id below {vocab_size}")
    return value
