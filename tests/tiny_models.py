"""Tiny random models for tests, as Hugging Face folders and as GGUF files.

Independent of the readers under test: GGUF is written with the `gguf` package, safetensors by hand (BF16 too).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_FILE_NAMES = {  # canonical: (transformers, GGUF)
    "embed": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm": ("model.norm.weight", "output_norm.weight"),
    "lm_head": ("lm_head.weight", "output.weight"),
    "attn_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "q_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "k_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "v_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "mlp_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
    "attn_post_norm": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    "mlp_post_norm": ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
}
_GEMMA3_MLP_NORM = "pre_feedforward_layernorm.weight"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class TinyModel:
    """Shape of a tiny model. The defaults have grouped heads; 64 columns suit blocks of 32, use 256 for K-quants."""

    architecture: str = "llama"
    vocab_size: int = 288
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, object] | None = None
    tie_word_embeddings: bool = False
    seed: int = 0
    sliding_window: int = 40  # gemma3
    window_period: int = 6  # gemma3: every such layer sees everything

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical names to shapes."""
        hidden, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        query, kv = self.num_heads * head, self.num_kv_heads * head
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "q": (query, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, query),
            "mlp_norm": (hidden,),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        if self.architecture == "qwen2":
            layer |= {"q_bias": (query,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.architecture in ("qwen3", "gemma3"):
            layer |= {"q_norm": (head,), "k_norm": (head,)}
        if self.architecture == "gemma3":
            layer |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden), "norm": (hidden,)}
        if not self.tie_word_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes

    def weights(self) -> dict[str, Floats]:
        """Random float32 weights by canonical name, in logical (transformers) row order; the same on every call."""
        random = np.random.default_rng(self.seed)
        weights: dict[str, Floats] = {}
        for name, shape in self.shapes().items():
            values = random.standard_normal(shape, dtype=np.float32)
            if len(shape) == 2:
                values *= np.float32(1 / np.sqrt(shape[1]))
            elif "norm" in name:
                values = np.float32(1) + np.float32(0.1) * values
            weights[name] = values
        return weights

    def stored_weights(self) -> dict[str, Floats]:
        """`weights` under transformers' names, as transformers stores them: gemma3 norms less one."""
        stored = {}
        for name, values in self.weights().items():
            if self.architecture == "gemma3" and name.endswith("norm"):
                values = values - np.float32(1)
            stored[transformers_name(name, self.architecture)] = values
        return stored

    def config_json(self) -> dict[str, object]:
        """config.json in the older style (rope_theta, rope_scaling)."""
        settings = self._common_settings()
        if self.architecture == "gemma3":
            del settings["hidden_act"]
            settings |= {
                "model_type": "gemma3_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": self.head_dim,
                "rope_local_base_freq": 10000.0,
                "sliding_window": self.sliding_window,
                "sliding_window_pattern": self.window_period,
            }
        return settings

    def _common_settings(self) -> dict[str, object]:
        return {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


def byte_tokens(vocab_size: int) -> list[str]:
    """Token texts of a byte-level vocabulary without merges: three control tokens, then GPT-2's byte letters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    tokens = ["<unk>", "<s>", "</s>", *letters]
    return (tokens + [f"<extra_{index}>" for index in range(vocab_size)])[:vocab_size]


def write_safetensors_folder(
    folder: Path, model: TinyModel, dtype: str = "F32", num_shards: int = 1
) -> Path:
    """A Hugging Face folder with weights of that dtype (F32, F16, BF16), config, and a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = model.stored_weights()
    (folder / "config.json").write_text(json.dumps(model.config_json()))
    write_tokenizer_files(folder, model.vocab_size)
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", weights, dtype)
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(weights.items())[shard::num_shards])
        write_safetensors(folder / file_name, part, dtype)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_tokenizer_files(folder: Path, vocab_size: int) -> None:
    """tokenizer.json (byte-level BPE without merges), tokenizer_config.json and generation_config.json."""
    tokens = byte_tokens(vocab_size)
    added = [
        {"id": index, "content": token, "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
        for index, token in enumerate(tokens[:3])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))


def write_safetensors(path: Path, weights: dict[str, Floats], dtype: str) -> None:
    """One safetensors file with all weights in `dtype`."""
    header: dict[str, object] = {}
    chunks: list[bytes] = []
    offset = 0
    for name, array in weights.items():
        data = encode_floats(array, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def encode_floats(array: Floats, dtype: str) -> bytes:
    """Little-endian F32, F16 or BF16 (round to nearest even) bytes."""
    if dtype == "F32":
        return array.astype("<f4").tobytes()
    if dtype == "F16":
        return array.astype("<f2").tobytes()
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2").tobytes()


def transformers_name(canonical: str, architecture: str = "llama") -> str:
    head, _, tail = canonical.rpartition(".")
    if architecture == "gemma3" and tail == "mlp_norm":
        return f"model.{head}.{_GEMMA3_MLP_NORM}"
    return (f"model.{head}." if head else "") + _FILE_NAMES[tail][0]


def gguf_name(canonical: str) -> str:
    head, _, tail = canonical.rpartition(".")
    return (head.replace("layers", "blk") + "." if head else "") + _FILE_NAMES[tail][1]


def permute_heads(array: Floats, num_heads: int) -> Floats:
    """What the GGUF converter does to q and k (rows or bias elements) of llama models."""
    rows = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return rows.swapaxes(1, 2).reshape(array.shape)


def gguf_bytes(array: Floats, type_name: str) -> NDArray[np.uint8]:
    """An array as uint8 [..., bytes per row] of a GGML type. K-quants, which `gguf` can't make, get random blocks."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name in ("Q4_K", "Q5_K", "Q6_K"):
        return random_blocks(type_name, array.shape, seed=int(array.size))
    encoded = quantize(np.ascontiguousarray(array), kind)
    return np.ascontiguousarray(encoded).view(np.uint8)


def random_blocks(type_name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    """Random quantised rows with small finite scales: uint8 [..., bytes per row]."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (int(np.prod(shape)) // block_size, block_bytes), np.uint8)
    for offset in SCALE_OFFSETS[type_name]:
        scales = (random.standard_normal(len(blocks)) * 0.002).astype("<f2")
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*shape[:-1], -1)


SCALE_OFFSETS = {  # where the f16 scales of a block lie
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def write_gguf(
    path: Path,
    model: TinyModel,
    matrix_type: str = "F32",
    types: dict[str, str] | None = None,
    metadata: Iterable[tuple[str, object]] = (),
    rope_freqs: Floats | None = None,
) -> Path:
    """A GGUF file whose matrices have `matrix_type` (`types` overrides by last part of the canonical name).

    `metadata` adds keys or replaces (None: drops) what the model would say; q and k are permuted for llama.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, model.architecture)
    overrides = dict(metadata)
    for key, value in (_gguf_metadata(model) | overrides).items():
        if value is not None:
            _add(writer, key, value)
    for name, array in model.weights().items():
        kind = name.rpartition(".")[2]
        if model.architecture == "llama" and kind in ("q", "k", "q_bias", "k_bias"):
            array = permute_heads(array, model.num_heads if kind[0] == "q" else model.num_kv_heads)
        type_name = (types or {}).get(kind, matrix_type if array.ndim == 2 else "F32")
        writer.add_tensor(
            gguf_name(name),
            gguf_bytes(array, type_name),
            raw_dtype=gguf.GGMLQuantizationType[type_name],
        )
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_metadata(model: TinyModel) -> dict[str, object]:
    tokens = byte_tokens(model.vocab_size)
    prefix = model.architecture
    window: dict[str, object] = {}
    if model.architecture == "gemma3":
        window[f"{prefix}.attention.sliding_window"] = model.sliding_window
        window[f"{prefix}.attention.sliding_window_pattern"] = model.window_period
    return window | {
        f"{prefix}.block_count": model.num_layers,
        f"{prefix}.context_length": model.max_position_embeddings,
        f"{prefix}.embedding_length": model.hidden_size,
        f"{prefix}.feed_forward_length": model.intermediate_size,
        f"{prefix}.attention.head_count": model.num_heads,
        f"{prefix}.attention.head_count_kv": model.num_kv_heads,
        f"{prefix}.attention.key_length": model.head_dim,
        f"{prefix}.attention.value_length": model.head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": model.rms_norm_eps,
        f"{prefix}.rope.freq_base": model.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise TypeError(f"{key}: {type(value).__name__}")
