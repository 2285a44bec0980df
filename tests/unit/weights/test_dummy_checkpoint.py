"""Models of random weights: shapes, containers, and that they run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from poise.config import CacheConfig, ComputeConfig, ModelSource, SchedulerConfig
from poise.core.sampling_params import SamplingParams
from poise.engine.build import build_engine
from poise.engine.client import EngineRequest
from poise.errors import ConfigError
from poise.llm import LLM
from poise.tokenizer.tokenizer import Tokenizer
from poise.weights.dequantize import GGML_TYPES
from poise.weights.dummy_checkpoint import byte_tokenizer, dummy_checkpoint
from tiny_models import TinyModel, write_tokenizer_files


def folder_of(tmp_path: Path, model: TinyModel) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(model.config_json()))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.2-1b", 1.2358), ("qwen3-4b", 4.0225), ("llama-3.1-8b", 8.0303)]
)
def test_named_shapes_have_the_models_parameters(name: str, billions: float) -> None:
    checkpoint = dummy_checkpoint(name)
    count = sum(math.prod(checkpoint.layout(tensor)[0]) for tensor in checkpoint.names)
    assert count / 1e9 == pytest.approx(billions, abs=1e-4)
    assert checkpoint.weight_bytes() == pytest.approx(2 * count, rel=1e-3)


def test_the_mix_is_llama_cpps() -> None:
    checkpoint = dummy_checkpoint("llama-3.1-8b", "Q4_K_M")
    types = {name: checkpoint.layout(name)[1] for name in checkpoint.names}
    assert types["embed"] == types["layers.5.gate"] == types["layers.5.v"] == "Q4_K"
    assert types["lm_head"] == types["layers.0.v"] == types["layers.31.down"] == "Q6_K"
    assert sum(types[f"layers.{layer}.down"] == "Q6_K" for layer in range(32)) == 16
    assert types["layers.0.attn_norm"] == "F32"
    assert checkpoint.weight_bytes() == pytest.approx(4.92e9, rel=0.01)


@pytest.mark.parametrize("container", GGML_TYPES)
def test_a_config_runs_in_any_container(tmp_path: Path, container: str) -> None:
    model = TinyModel(
        hidden_size=256, intermediate_size=256, head_dim=64, num_layers=1, vocab_size=300
    )
    folder = folder_of(tmp_path, model)
    engine = build_engine(
        ModelSource(str(folder), load_format=f"dummy:{container}"),
        CacheConfig(),
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
        ComputeConfig(threads=1),
    )
    try:
        assert engine.info.details["format"] == f"dummy {container}"
        prompt = tuple(engine.tokenizer.encode("hello", add_special_tokens=True))
        engine.add_request(
            0, EngineRequest("r", prompt, SamplingParams(max_tokens=3, temperature=0.0), 0)
        )
        token_ids: list[int] = []
        while len(token_ids) < 3:
            for _, delta in engine.step():
                token_ids += [token for choice in delta.choices for token in choice.token_ids]
        assert all(0 <= token < 300 for token in token_ids)
    finally:
        engine.close()


def test_the_offline_api_takes_the_format(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, TinyModel(vocab_size=300))
    with LLM(str(folder), load_format="dummy", threads=1, kv_cache_memory_bytes=2**20) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        [output] = llm.generate(["hello"], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_the_same_name_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, TinyModel())
    first, again = (dummy_checkpoint(str(folder), "Q4_0") for _ in range(2))
    name = "layers.1.down"
    assert (first.tensor(name).data == again.tensor(name).data).all()
    assert first.digest() == again.digest() != dummy_checkpoint(str(folder), "Q8_0").digest()
    assert (first.tensor("norm").data.view(np.float32) == 1).all()
    assert first.tensor(name).data.nbytes == first.layout(name)[2]


def test_a_folders_own_tokenizer_is_used(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, TinyModel())
    write_tokenizer_files(folder, 288)
    assert dummy_checkpoint(str(folder)).tokenizer.eos_token_ids == (2,)


def test_every_id_of_the_byte_tokenizer_has_a_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer(400))
    ids = tokenizer.encode("déjà <|x|>\n", add_special_tokens=False)
    assert len(ids) == len("déjà <|x|>\n".encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == "déjà <|x|>\n"
    assert tokenizer.token_bytes(399) == b"<399>"
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("model", "container", "message"),
    [
        (
            "llama-9",
            "BF16",
            "neither a folder with a config.json nor one of the shapes llama-3.2-1b",
        ),
        ("llama-3.2-1b", "Q3_K", "no such container; known: F32"),
        ("", "Q4_K", "rows of .* have 64 elements, no multiple of the Q4_K block of 256"),
    ],
)
def test_what_can_not_be_made_is_refused(
    tmp_path: Path, model: str, container: str, message: str
) -> None:
    folder = folder_of(tmp_path, TinyModel())
    with pytest.raises(ConfigError, match=message):
        dummy_checkpoint(model or str(folder), container)


def test_the_flag_names_formats() -> None:
    assert ModelSource(load_format="dummy:Q4_K_M").load_format == "dummy:Q4_K_M"
    with pytest.raises(ConfigError, match="expected auto, dummy"):
        ModelSource(load_format="safetensors")
