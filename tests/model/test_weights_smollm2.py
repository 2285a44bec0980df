"""The pulled model through our reader and through the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize

from poise.models.registry import REGISTRY
from poise.weights.checkpoint import Checkpoint
from poise.weights.dequantize import dequantize
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import gguf_name, permute_heads


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def reader(smollm2_path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2_path)


def test_identity(checkpoint: Checkpoint) -> None:
    assert checkpoint.name == "smollm2-135m"
    assert checkpoint.format == "GGUF Q4_1"
    assert checkpoint.digest() == REGISTRY["smollm2-135m"].sha256
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (49152, 576, 64)
    assert config.rope.theta == 100000.0
    assert config.tie_word_embeddings


def test_every_tensor_is_the_gguf_package_s(
    checkpoint: Checkpoint, reader: gguf.GGUFReader
) -> None:
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = ["embed", "norm"]
    for layer in range(checkpoint.config.num_layers):
        kinds = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")
        names += [f"layers.{layer}.{kind}" for kind in kinds]
    assert len(names) == len(stored)
    for name in names:
        ours = dequantize(checkpoint.tensor(name))
        if name.endswith((".q", ".k")):  # put back into the file's order
            config = checkpoint.config
            heads = config.num_heads if name.endswith(".q") else config.num_kv_heads
            ours = permute_heads(ours, heads)
        tensor = stored[gguf_name(name)]
        theirs = gguf_dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)), name


def test_tokenizer_metadata_is_the_gguf_package_s(
    checkpoint: Checkpoint, reader: gguf.GGUFReader
) -> None:
    tokenizer = checkpoint.tokenizer
    expected = {k: f for k, f in reader.fields.items() if k.startswith("tokenizer.")}
    assert set(tokenizer.gguf) == set(expected)
    for key, field in expected.items():
        assert tokenizer.gguf[key] == field.contents(), key
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.add_bos_token is False
