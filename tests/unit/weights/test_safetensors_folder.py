"""Hugging Face folders: weights, configuration, tokenizer facts, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from poise.errors import ModelFileError
from poise.weights.dequantize import dequantize
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import LLAMA3_SCALING, TinyModel, encode_floats, write_safetensors_folder

DATA = Path(__file__).parents[2] / "data"


def edit_json(path: Path, **changes: object) -> None:
    """Sets keys; None removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "num_shards"), [("F32", 1), ("F16", 3), ("BF16", 2)])
def test_every_weight_comes_back(
    tmp_path: Path, architecture: str, dtype: str, num_shards: int
) -> None:
    model = TinyModel(architecture, tie_word_embeddings=architecture == "qwen3")
    checkpoint = open_checkpoint(
        write_safetensors_folder(tmp_path / "tiny", model, dtype, num_shards)
    )
    assert checkpoint.format == f"safetensors {dtype}"
    assert checkpoint.name == "tiny"
    for name, expected in model.weights().items():
        tensor = checkpoint.tensor(name)
        assert tensor.data.tobytes() == encode_floats(expected, dtype)
        assert dequantize(tensor).shape == expected.shape
    assert checkpoint.has("lm_head") is not model.tie_word_embeddings


def test_configuration_of_a_folder_saved_by_transformers() -> None:
    checkpoint = open_checkpoint(DATA / "tiny_llama")
    config = checkpoint.config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rope.theta == 10000.0
    factors = config.rope.factors
    assert factors is not None
    assert factors[0] == 1.0
    assert factors[3:] == (8.0,) * 5
    # As transformers computes them, in float32 tensors.
    inverse = np.float32(1) / np.float32(10000.0) ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    smooth = (64 / (2 * np.pi / inverse) - 1) / (4 - 1)
    expected = (1 - smooth) * inverse / 8 + smooth * inverse
    np.testing.assert_allclose(inverse[1:3] / factors[1:3], expected[1:3], rtol=1e-6)


def test_old_and_new_rope_keys_agree(tmp_path: Path) -> None:
    model = TinyModel(rope_scaling=LLAMA3_SCALING)
    folder = write_safetensors_folder(tmp_path / "m", model)
    old = open_checkpoint(folder).config.rope
    edit_json(
        folder / "config.json",
        rope_scaling=None,
        rope_theta=None,
        rope_parameters=LLAMA3_SCALING | {"rope_theta": 10000.0},
    )
    assert open_checkpoint(folder).config.rope == old
    edit_json(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    rope = open_checkpoint(folder).config.rope
    assert (rope.theta, rope.factors) == (5e5, None)
    edit_json(folder / "config.json", rope_parameters={"type": "linear", "factor": 2.0})
    assert open_checkpoint(folder).config.rope.factors == (2.0,) * 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 10**12}, "model.layers.2."),
        ({"num_hidden_layers": 1}, "model.layers.1."),
        ({"hidden_size": 128}, "(288, 64)"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"vocab_size": None}, "vocab_size"),
        ({"max_position_embeddings": 10**9}, "1000000000"),
    ],
)
def test_refused_configuration_is_named(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    edit_json(folder / "config.json", **changes)
    assert named in refusal(folder)


def test_harmless_configuration_is_accepted(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    edit_json(folder / "config.json", architectures=["MistralForCausalLM"], sliding_window=512)
    assert open_checkpoint(folder).config.architecture == "llama"
    folder = write_safetensors_folder(tmp_path / "q", TinyModel("qwen2"))
    edit_json(folder / "config.json", sliding_window=64, use_sliding_window=False)
    open_checkpoint(folder)
    edit_json(folder / "config.json", use_sliding_window=True)
    assert "sliding_window" in refusal(folder)


def test_bias_of_the_output_projection_is_refused(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = "model.layers.0.self_attn.o_proj.bias"
    header[name] = {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}
    safetensors_file(folder, header, content[8 + length :])
    assert name in refusal(folder)


def safetensors_file(folder: Path, header: object, data: bytes = bytes(64)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: str = "F32", shape: object = (4, 4), offsets: object = (0, 64)) -> object:
    return {"model.norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"{", "header is damaged"),
        (b"[" * 100_000, "header is damaged"),
        ([], "header is damaged"),
        ({"a": 1}, "header is damaged"),
        (entry(dtype="I8"), "'I8'"),
        (entry(shape=[]), "shape"),
        (entry(shape=[0, 4]), "shape"),
        (entry(shape=[-4, -4]), "shape"),
        (entry(shape=[2**40, 2**40]), "has 64 bytes"),
        (entry(shape=[4, 3]), "has 64 bytes"),
        (entry(offsets=[0, 65]), "outside"),
        (entry(offsets=[-64, 0]), "outside"),
        (entry(offsets=[64, 0]), "outside"),
        (entry(offsets=[0, 2**70]), "damaged"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, header: object, named: str) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    safetensors_file(folder, header)
    assert named in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"1234", (2**63).to_bytes(8, "little") + bytes(99)])
def test_cut_safetensors(tmp_path: Path, content: bytes) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    (folder / "model.safetensors").write_bytes(content)
    refusal(folder)


def test_truncated_file(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "outside" in refusal(folder)


@pytest.mark.parametrize("name", ["../m/model.safetensors", "/etc/passwd", "x.bin", "", 5])
def test_index_may_not_leave_the_folder(tmp_path: Path, name: object) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert "no file of this folder" in refusal(folder)


def test_missing_shard_and_missing_files(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel(), num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(folder)
    folder = write_safetensors_folder(tmp_path / "n", TinyModel())
    (folder / "model.safetensors").unlink()
    assert "neither" in refusal(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel(), num_shards=2)
    shutil.copy(
        folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    )
    assert "also in another file" in refusal(folder)


def test_tokenizer_facts(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    edit_json(folder / "generation_config.json", eos_token_id=[7, 2])
    edit_json(folder / "tokenizer_config.json", chat_template="from settings")
    tokenizer = open_checkpoint(folder).tokenizer
    assert tokenizer.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert tokenizer.gguf == {}
    assert tokenizer.eos_token_ids == (7, 2)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.add_bos_token is False
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert tokenizer.chat_template == "from settings"
    (folder / "chat_template.jinja").write_text("from file")
    assert open_checkpoint(folder).tokenizer.chat_template == "from file"


def test_templates_by_name_and_token_objects(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    templates = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    edit_json(
        folder / "tokenizer_config.json", chat_template=templates, eos_token={"content": "<unk>"}
    )
    tokenizer = open_checkpoint(folder).tokenizer
    assert tokenizer.chat_template == "d"
    assert tokenizer.eos_token_ids == (2, 0)


def test_bos_is_added_where_the_post_processor_does(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    sequence = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
    for processor in (template, sequence):
        edit_json(folder / "tokenizer.json", post_processor=processor)
        assert open_checkpoint(folder).tokenizer.add_bos_token is True
    edit_json(folder / "tokenizer_config.json", add_bos_token=False)
    assert open_checkpoint(folder).tokenizer.add_bos_token is False


def test_damaged_tokenizer_files(tmp_path: Path) -> None:
    folder = write_safetensors_folder(tmp_path / "m", TinyModel())
    edit_json(folder / "generation_config.json", eos_token_id=288)
    with pytest.raises(ModelFileError, match="288"):
        _ = open_checkpoint(folder).tokenizer
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        _ = open_checkpoint(folder).tokenizer
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match="is missing"):
        _ = open_checkpoint(folder).tokenizer


def test_digest_depends_on_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISE_HOME", str(tmp_path / "home"))
    folder = write_safetensors_folder(tmp_path / "m", TinyModel(), num_shards=2)
    digests = {open_checkpoint(folder).digest(), open_checkpoint(folder).digest()}
    edit_json(folder / "generation_config.json", eos_token_id=[3, 4])
    digests.add(open_checkpoint(folder).digest())
    edit_json(folder / "config.json", rope_theta=20000.0)
    digests.add(open_checkpoint(folder).digest())
    assert len(digests) == 3
