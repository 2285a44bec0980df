"""The tool that writes random GGUF files: poise reads back what `--load-format dummy` makes."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from poise.weights.dummy_checkpoint import dummy_checkpoint
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, write_gguf

TOOL = Path(__file__).parents[3] / "benchmarks" / "make_gguf.py"


@pytest.mark.parametrize(("architecture", "container"), [("llama", "Q4_K_M"), ("qwen3", "BF16")])
def test_the_file_holds_the_dummys_tensors(
    tmp_path: Path, architecture: str, container: str
) -> None:
    spec = importlib.util.spec_from_file_location("make_gguf", TOOL)
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    model = TinyModel(
        architecture,
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    (tmp_path / "config.json").write_text(json.dumps(model.config_json()))
    dummy = dummy_checkpoint(str(tmp_path), container)
    other = open_checkpoint(write_gguf(tmp_path / "other.gguf", TinyModel(vocab_size=288)))
    tool.write(dummy, 15, other.tokenizer.gguf, tmp_path / "random.gguf")
    written = open_checkpoint(tmp_path / "random.gguf")
    eps = float(np.float32(dummy.config.rms_norm_eps))
    assert written.config == replace(dummy.config, rms_norm_eps=eps)
    assert written.weight_bytes() == dummy.weight_bytes()
    for name in dummy.names:
        made, read = dummy.tensor(name), written.tensor(name)
        assert (made.type, made.shape) == (read.type, read.shape)
        assert (made.data == read.data).all()
    tokens = written.tokenizer.gguf["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 320
    assert tokens[288] == "<made_up_288>"
