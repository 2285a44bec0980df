"""A model of a given shape with random weights: for measuring speed and memory without a file (vLLM's `dummy`).

A tensor is made when it is asked for and not kept. Invariant: shape, container and name fix every byte.
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from poise.errors import ConfigError
from poise.models.config import ModelConfig, TokenizerData
from poise.weights.checkpoint import RawTensor
from poise.weights.dequantize import GGML_TYPES
from poise.weights.dummy_shapes import SHAPES
from poise.weights.hugging_face_config import JSONFields, model_config
from poise.weights.hugging_face_tokenizer import read_tokenizer
from poise.weights.json_file import read_json
from poise.weights.mapped_checkpoint import check_config, expected_shapes
from poise.weights.random_blocks import random_matrix

DEFAULT_CONTAINER = "BF16"
MIX = "Q4_K_M"  # llama.cpp's mix: Q6_K for the output and half of v and down, Q4_K for the rest
_CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def dummy_checkpoint(model: str, container: str = DEFAULT_CONTAINER) -> DummyCheckpoint:
    """Random weights of a named shape, or of a folder's config.json.

    Raises ConfigError for an unknown shape or container, ModelFileError for a configuration that can't be run.
    """
    if container not in (*GGML_TYPES, MIX):
        known = ", ".join([*GGML_TYPES, MIX])
        raise ConfigError(f"--load-format dummy:{container}: no such container; known: {known}")
    path = Path(model).expanduser()
    if model in SHAPES:
        values: dict[str, object] = SHAPES[model]
    elif (path / "config.json").exists():
        path = path / "config.json"
        values = read_json(path)
    else:
        raise ConfigError(
            f"--load-format dummy: {model!r} is neither a folder with a config.json nor one of the "
            f"shapes {', '.join(SHAPES)}"
        )
    config = model_config(JSONFields(path, values), qkv_bias=False)
    check_config(path, config)
    return DummyCheckpoint(path, model if model in SHAPES else path.parent.name, config, container)


class DummyCheckpoint:
    """`Checkpoint` made of nothing."""

    def __init__(self, path: Path, name: str, config: ModelConfig, container: str) -> None:
        self.path = path
        self.name = name
        self.config = config
        self.format = f"dummy {container}"
        self._container = container
        self._shapes = dict(expected_shapes(config))
        for tensor, shape in self._shapes.items():
            ggml_type = GGML_TYPES[self._type(tensor)]
            if shape[-1] % ggml_type.block_size:
                raise ConfigError(
                    f"--load-format dummy:{container}: rows of {tensor!r} have {shape[-1]} elements, "
                    f"no multiple of the {ggml_type.name} block of {ggml_type.block_size}"
                )

    @property
    def names(self) -> list[str]:
        """Canonical names of all tensors."""
        return list(self._shapes)

    @cached_property
    def tokenizer(self) -> TokenizerData:
        """The folder's, where it has one; else one token per byte, the other ids spelled as numbers."""
        if (self.path.parent / "tokenizer.json").exists():
            return read_tokenizer(self.path.parent, self.config.vocab_size)
        return byte_tokenizer(self.config.vocab_size)

    def layout(self, name: str) -> tuple[tuple[int, ...], str, int]:
        """A tensor's shape, type and bytes, without making it."""
        shape, ggml_type = self._shapes[name], GGML_TYPES[self._type(name)]
        num_blocks = math.prod(shape) // ggml_type.block_size
        return shape, ggml_type.name, num_blocks * ggml_type.block_bytes

    def tensor(self, name: str) -> RawTensor:
        """Random matrices, norms of 1, biases of 0."""
        shape, type_name, _ = self.layout(name)
        if len(shape) == 1:
            values = np.full((1, *shape), 1 if "norm" in name else 0, "<f4")
            return RawTensor(name, type_name, shape, values.view(np.uint8))
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        return RawTensor(name, type_name, shape, random_matrix(type_name, shape[0], shape[1], seed))

    def has(self, name: str) -> bool:
        return name in self._shapes

    def release(self) -> None:
        """Nothing is kept."""

    def weight_bytes(self) -> int:
        """Bytes that a file of this container would hold."""
        return sum(self.layout(name)[2] for name in self._shapes)

    def digest(self) -> str:
        return hashlib.sha256(f"{self.format}|{self.config!r}".encode()).hexdigest()

    def _type(self, name: str) -> str:
        if len(self._shapes[name]) == 1:
            return "F32"
        return self._mixed_type(name) if self._container == MIX else self._container

    def _mixed_type(self, name: str) -> str:
        layer_name, _, kind = name.rpartition(".")
        if kind == "lm_head" or (kind == "embed" and self.config.tie_word_embeddings):
            return "Q6_K"
        if kind in ("v", "down"):
            layer, count = int(layer_name.removeprefix("layers.")), self.config.num_layers
            first = count // 8
            if layer < first or layer >= 7 * count // 8 or (layer - first) % 3 == 2:
                return "Q6_K"
        return "Q4_K"


def byte_tokenizer(vocab_size: int) -> TokenizerData:
    """A tokenizer that needs no file: a token per byte; ids from 256 on appear only in answers."""
    tokens = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *map("<{}>".format, range(256, vocab_size)),
    ]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerData(tokenizer_json=tokenizer.to_str(), chat_template=_CHAT_TEMPLATE)
