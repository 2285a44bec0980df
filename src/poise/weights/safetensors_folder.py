"""A local Hugging Face folder (config.json, safetensors files, tokenizer files) as a checkpoint.

Knows which files such a folder has and transformers' tensor names. Invariant: only files directly
inside the folder are read; no code and no pickle is ever loaded.
"""

from __future__ import annotations

import hashlib
import mmap
from functools import cached_property
from pathlib import Path

import numpy as np

from poise.errors import ModelFileError
from poise.models.config import ModelConfig, TokenizerData
from poise.weights.cache import file_digest
from poise.weights.checkpoint import RawTensor
from poise.weights.dequantize import dequantize
from poise.weights.hugging_face_config import MAX_LAYERS, JSONFields, model_config
from poise.weights.hugging_face_tokenizer import read_tokenizer
from poise.weights.json_file import read_json
from poise.weights.mapped_checkpoint import MappedCheckpoint, check_config, check_tensors
from poise.weights.safetensors import read_safetensors

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_IDENTITY_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_TOP_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


class SafetensorsCheckpoint(MappedCheckpoint):
    """An opened Hugging Face folder. Raises ModelFileError naming file and field."""

    def __init__(self, path: Path) -> None:
        self._shards = _shards(path)
        by_name: dict[str, RawTensor] = {}
        maps: list[mmap.mmap] = []
        for shard in self._shards:
            mapped, tensors = read_safetensors(shard)
            maps.append(mapped)
            for name, tensor in tensors.items():
                if name in by_name:
                    raise ModelFileError(f"{shard}: tensor {name!r} is also in another file")
                by_name[name] = tensor
        config_path = path / "config.json"
        fields = JSONFields(config_path, read_json(config_path))
        bias = "model.layers.0.self_attn.q_proj.bias" in by_name
        embedding = by_name.get(_TOP_NAMES["embed"])
        config = model_config(
            fields, qkv_bias=bias, embedding_type=embedding.type if embedding else "F32"
        )
        check_config(path, config)
        if config.tie_word_embeddings:
            by_name.pop(_TOP_NAMES["lm_head"], None)  # a copy that transformers overwrites too
        rename = _file_names(config)
        tensors = _canonical_tensors(by_name, rename)
        check_tensors(path, config, tensors, rename)
        if config.architecture == "gemma3":
            tensors = {
                name: _plus_one(tensor) if name.endswith("norm") else tensor
                for name, tensor in tensors.items()
            }
        super().__init__(path, "safetensors", config, tensors, maps)

    @cached_property
    def tokenizer(self) -> TokenizerData:
        """What tokenizer.json, tokenizer_config.json and generation_config.json say, read on first
        use.
        """
        return read_tokenizer(self.path, self.config.vocab_size)

    def digest(self) -> str:
        """sha256 over the names and digests of the files that make the answer."""
        files = [self.path / name for name in _IDENTITY_FILES] + list(self._shards)
        total = hashlib.sha256()
        for file in sorted(file for file in files if file.exists()):
            total.update(f"{file_digest(file)}  {file.name}\n".encode())
        return total.hexdigest()


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of the folder, from the index where there is one."""
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise ModelFileError(f"{folder}: has neither {_SINGLE} nor {_INDEX}")
        return [folder / _SINGLE]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: 'weight_map' is not an object with entries")
    shards: dict[str, None] = {}
    for tensor, name in weight_map.items():
        if (
            not isinstance(name, str)
            or not name.endswith(".safetensors")
            or name != Path(name).name
        ):
            raise ModelFileError(
                f"{index}: 'weight_map' puts {tensor!r} in {name!r}, no file of this folder"
            )
        shards[name] = None
    return [folder / name for name in shards]


def _plus_one(tensor: RawTensor) -> RawTensor:
    """Gemma 3 keeps the weights of its norms less one; the sum is float32, as in transformers."""
    values = np.float32(1) + dequantize(tensor).reshape(1, -1)
    return RawTensor(tensor.name, "F32", tensor.shape, values.view(np.uint8))


def _file_names(config: ModelConfig) -> dict[str, str]:
    """Canonical name to transformers' name."""
    names = dict(_TOP_NAMES)
    layer_names = _GEMMA3_LAYER_NAMES if config.architecture == "gemma3" else _LAYER_NAMES
    for index in range(min(config.num_layers, MAX_LAYERS)):
        for canonical, name in layer_names.items():
            names[f"layers.{index}.{canonical}"] = f"model.layers.{index}.{name}"
    return names


def _canonical_tensors(
    by_name: dict[str, RawTensor], rename: dict[str, str]
) -> dict[str, RawTensor]:
    canonical = {name: key for key, name in rename.items()}
    # A name that nothing maps keeps its own, and check_tensors refuses it; old files hold a rope
    # table beside the config.
    return {
        canonical.get(name, name): tensor
        for name, tensor in by_name.items()
        if not name.endswith(".rotary_emb.inv_freq")
    }
