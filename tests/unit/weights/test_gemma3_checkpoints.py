"""Gemma 3 files: windows, two ropes, norms less one, the embedding's scale, ends of a turn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poise.errors import ModelFileError
from poise.models.config import RopeConfig
from poise.weights.dequantize import dequantize
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, byte_tokens, write_gguf, write_safetensors_folder

MODEL = TinyModel("gemma3", num_layers=7, num_kv_heads=1, rope_theta=1e6, rms_norm_eps=2**-20)
WINDOWS = (40, 40, 40, 40, 40, None, 40)


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in settings.items() if v != "gone"}))
    return folder


def test_both_kinds_of_file_say_the_same(tmp_path: Path) -> None:
    gguf = open_checkpoint(write_gguf(tmp_path / "m.gguf", MODEL))
    folder = open_checkpoint(write_safetensors_folder(tmp_path / "m", MODEL))
    assert gguf.config == folder.config
    config = gguf.config
    assert config.windows == WINDOWS
    assert (config.qk_norm, config.post_norms, config.embedding_scale) == (True, True, 8.0)
    assert config.query_scale == 0.25
    assert (config.rope, config.local_rope) == (RopeConfig(1e6, 16), RopeConfig(1e4, 16))
    for name, values in MODEL.weights().items():
        for checkpoint in (gguf, folder):
            np.testing.assert_array_equal(dequantize(checkpoint.tensor(name)), values, name)


@pytest.mark.parametrize(
    ("dtype", "hidden", "scale"),
    [("F32", 96, float(np.float32(math.sqrt(96)))), ("BF16", 96, 9.8125), ("F16", 96, 9.796875)],
)
def test_the_embeddings_scale_is_rounded_to_their_type(
    tmp_path: Path, dtype: str, hidden: int, scale: float
) -> None:
    folder = write_safetensors_folder(
        tmp_path / "m", TinyModel("gemma3", hidden_size=hidden), dtype
    )
    assert open_checkpoint(folder).config.embedding_scale == scale


def test_new_keys_of_transformers(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", MODEL)
    old = open_checkpoint(folder).config
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["full_attention" if window is None else "sliding_attention" for window in WINDOWS]
    edited(
        folder,
        rope_parameters=ropes,
        layer_types=kinds,
        rope_theta="gone",
        rope_scaling="gone",
        rope_local_base_freq="gone",
        sliding_window_pattern="gone",
    )
    assert open_checkpoint(folder).config == old
    edited(folder, layer_types=["full_attention", *kinds[1:]])
    assert open_checkpoint(folder).config.windows == (None, *WINDOWS[1:])


def test_only_layers_that_see_everything_stretch_their_rope(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", MODEL)
    edited(folder, rope_scaling={"rope_type": "linear", "factor": 8.0})
    metadata = [("gemma3.rope.scaling.type", "linear"), ("gemma3.rope.scaling.factor", 8.0)]
    for path in (folder, write_gguf(tmp_path / "m.gguf", MODEL, metadata=metadata)):
        config = open_checkpoint(path).config
        assert config.rope == RopeConfig(1e6, 16, (8.0,) * 8)
        assert config.local_rope == RopeConfig(1e4, 16)


def test_scale_of_scores(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", MODEL)
    edited(folder, query_pre_attn_scalar=64)
    assert open_checkpoint(folder).config.query_scale == 0.125


def test_windows_of_gguf_files(tmp_path: Path) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    path = write_gguf(tmp_path / "a.gguf", MODEL, metadata=[(key, None)])
    assert open_checkpoint(path).config.windows == WINDOWS
    path = write_gguf(tmp_path / "b.gguf", MODEL, metadata=[(key, [True, False] + [True] * 5)])
    assert open_checkpoint(path).config.windows == (40, None, *[40] * 5)
    path = write_gguf(tmp_path / "c.gguf", MODEL, metadata=[(key, [True, False])])
    with pytest.raises(ModelFileError, match=r"2 entries for 7 layers"):
        open_checkpoint(path)
    path = write_gguf(
        tmp_path / "d.gguf", MODEL, metadata=[("gemma3.attention.sliding_window", None)]
    )
    with pytest.raises(ModelFileError, match=r"gemma3.attention.sliding_window"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["sliding_attention"]}, "7 layers"),
        ({"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_parameters": {"full_attention": {}}}, "sliding_attention"),
    ],
)
def test_refused_settings_are_named(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    folder = edited(write_safetensors_folder(tmp_path / "m", MODEL), **changes)
    with pytest.raises(ModelFileError, match=named):
        open_checkpoint(folder)


def test_the_end_of_a_turn_ends_an_answer(tmp_path: Path) -> None:
    tokens = byte_tokens(288)
    tokens[270:272] = ["<end_of_turn>", "<start_of_turn>"]
    types = [3] * 3 + [1] * 267 + [3] * 2 + [1] * 16
    metadata = [("tokenizer.ggml.tokens", tokens), ("tokenizer.ggml.token_type", types)]
    path = write_gguf(tmp_path / "m.gguf", MODEL, metadata=metadata)
    assert open_checkpoint(path).tokenizer.eos_token_ids == (2, 270)
    types[270] = 1  # a piece of text that only looks like one
    path = write_gguf(tmp_path / "n.gguf", MODEL, metadata=metadata)
    assert open_checkpoint(path).tokenizer.eos_token_ids == (2,)
