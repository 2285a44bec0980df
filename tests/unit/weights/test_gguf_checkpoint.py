"""GGUF files of tiny models: configuration, canonical tensors, refusals."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.errors import ModelFileError
from poise.models.config import RopeConfig
from poise.weights.dequantize import dequantize
from poise.weights.gguf import GGUFFile
from poise.weights.gguf_checkpoint import GGUFCheckpoint, rotary_row_order
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, byte_tokens, permute_heads, write_gguf

ARCHITECTURES = ["llama", "qwen2", "qwen3"]


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        GGUFCheckpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_comes_back_in_logical_order(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    model = TinyModel(architecture, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    assert checkpoint.format == "GGUF F32"
    assert checkpoint.name == "m"
    assert checkpoint.has("lm_head") is not tied
    weights = model.weights()
    for name, expected in weights.items():
        np.testing.assert_array_equal(dequantize(checkpoint.tensor(name)), expected, name)
    assert checkpoint.weight_bytes() == sum(array.nbytes for array in weights.values())
    with pytest.raises(ModelFileError, match="'nonsense'"):
        checkpoint.tensor("nonsense")


def test_biases_of_a_llama_file_are_put_in_order(tmp_path: Path) -> None:
    class Biased(TinyModel):
        def shapes(self) -> dict[str, tuple[int, ...]]:
            biases = {
                f"layers.{index}.{kind}_bias": ((64 if kind == "q" else 32),)
                for index in range(2)
                for kind in "qkv"
            }
            return super().shapes() | biases

    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", Biased()))
    assert checkpoint.config.qkv_bias
    for name, expected in Biased().weights().items():
        np.testing.assert_array_equal(dequantize(checkpoint.tensor(name)), expected, name)


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_matrices_keep_their_rows(tmp_path: Path, type_name: str) -> None:
    model = TinyModel()
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model, type_name))
    assert checkpoint.format == f"GGUF {type_name}"
    expected = model.weights()["layers.1.k"]
    error = np.abs(dequantize(checkpoint.tensor("layers.1.k")) - expected).max()
    assert error < 0.1 * np.abs(expected).max()


def test_k_quants_open(tmp_path: Path) -> None:
    model = TinyModel(hidden_size=256, intermediate_size=512, head_dim=64)
    types = {"q": "Q5_K", "down": "Q6_K", "embed": "Q6_K"}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model, "Q4_K", types))
    assert checkpoint.format == "GGUF Q4_K"
    assert checkpoint.tensor("layers.0.q").type == "Q5_K"
    assert checkpoint.tensor("embed").type == "Q6_K"


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_row_order_inverts_the_converter(num_heads: int, half: int, seed: int) -> None:
    logical = np.random.default_rng(seed).standard_normal((num_heads * half * 2, 3))
    stored = permute_heads(logical, num_heads)
    np.testing.assert_array_equal(stored[rotary_row_order(num_heads, 2 * half)], logical)


def test_configuration(tmp_path: Path) -> None:
    model = TinyModel("qwen3", head_dim=32, rope_theta=1e6, max_position_embeddings=777)
    config = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model)).config
    assert config.rope == RopeConfig(1e6, 32, None)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert config.max_position_embeddings == 777
    assert config.vocab_size == 288
    assert config.qk_norm
    assert not config.qkv_bias


def test_rope_factors_and_linear_scaling_multiply(tmp_path: Path) -> None:
    freqs = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", TinyModel(), rope_freqs=freqs)
    assert GGUFCheckpoint(path).config.rope.factors == tuple(freqs.tolist())
    linear = [("llama.rope.scaling.type", "linear"), ("llama.rope.scaling.factor", 4.0)]
    path = write_gguf(tmp_path / "b.gguf", TinyModel(), metadata=linear)
    assert GGUFCheckpoint(path).config.rope.factors == (4.0,) * 8
    path = write_gguf(tmp_path / "c.gguf", TinyModel(), metadata=linear, rope_freqs=freqs)
    assert GGUFCheckpoint(path).config.rope.factors == tuple((4 * freqs).tolist())


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv"),
        ({"llama.attention.head_count_kv": 3}, "3 KV heads"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"llama.rope.freq_base": -1.0}, "freq_base"),
        ({"llama.rope.dimension_count": 8}, "partial rotary"),
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "blk.1."),
        ({"llama.block_count": 2**32 - 1}, "blk.2."),
        ({"llama.context_length": None}, "context_length"),
        ({"llama.context_length": 2**32 - 1}, "4294967295"),
        ({"llama.embedding_length": 32}, "(288, 64)"),
        ({"llama.feed_forward_length": 2**32 - 1}, "ffn_gate"),
        ({"tokenizer.ggml.tokens": ["a"] * 289}, "289 tokens"),
    ],
)
def test_refused_metadata_is_named(tmp_path: Path, metadata: dict[str, object], named: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", TinyModel(), metadata=metadata.items())
    assert named in refusal(path)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    metadata = [("llama.attention.sliding_window", 512), ("llama.expert_count", 0)]
    GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", TinyModel(), metadata=metadata))


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TinyModel())
    path.write_bytes(path.read_bytes().replace(b"llama", b"lemma"))
    assert "'lemma'" in refusal(path)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TinyModel())
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_v.weight", b"blk.1.attn_v.wight!"))
    assert "blk.1.attn_v" in refusal(path)
    path = write_gguf(tmp_path / "n.gguf", TinyModel("qwen2"))
    path.write_bytes(path.read_bytes().replace(b"qwen2", b"llama"))
    GGUFCheckpoint(path)  # a llama file with biases is a model, too
    path = write_gguf(tmp_path / "o.gguf", TinyModel("qwen3"))
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"qwen2"))
    assert "blk.0.attn_q.bias" in refusal(path) or "attn_q_norm" in refusal(path)


def test_tokenizer_metadata(tmp_path: Path) -> None:
    extra = [("tokenizer.ggml.eot_token_id", 5), ("tokenizer.chat_template", "{{ x }}")]
    tokenizer = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", TinyModel(), metadata=extra)
    ).tokenizer
    assert tokenizer.tokenizer_json is None
    assert tokenizer.gguf["tokenizer.ggml.tokens"] == byte_tokens(288)
    assert tokenizer.gguf["tokenizer.ggml.token_type"] == [3] * 3 + [1] * 285
    assert tokenizer.gguf["tokenizer.ggml.merges"] == ["a b"]
    assert tokenizer.eos_token_ids == (2, 5)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.chat_template == "{{ x }}"
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert tokenizer.add_bos_token is False


@pytest.mark.parametrize(
    ("model", "pre", "expected"),
    [("llama", None, True), ("gpt2", "llama-bpe", True), ("gpt2", "gpt-2", False)],
)
def test_add_bos_default(tmp_path: Path, model: str, pre: str | None, expected: bool) -> None:
    metadata: list[tuple[str, object]] = [
        ("tokenizer.ggml.add_bos_token", None),
        ("tokenizer.ggml.model", model),
        ("tokenizer.ggml.pre", pre),
    ]
    path = write_gguf(tmp_path / "m.gguf", TinyModel(), metadata=metadata)
    assert GGUFCheckpoint(path).tokenizer.add_bos_token is expected


def test_special_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", TinyModel(), metadata=[("tokenizer.ggml.eos_token_id", 288)]
    )
    with pytest.raises(ModelFileError, match="eos_token_id"):
        _ = GGUFCheckpoint(path).tokenizer


def container(metadata: bytes = b"", tensors: bytes = b"", keys: int = 0, count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, count, keys) + metadata + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor_info(
    dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, name: bytes = b"t"
) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


HUGE = 2**64 - 1
HOSTILE = {
    "empty": (b"", "is empty"),
    "magic": (b"GGML" + bytes(20), "magic"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (container(count=HUGE), "tensor count"),
    "metadata count": (container(keys=HUGE), "metadata count"),
    "key length": (container(struct.pack("<Q", HUGE), keys=1), "metadata key 0"),
    "value type": (container(text(b"k") + struct.pack("<I", 99), keys=1), "'k'"),
    "string length": (container(text(b"k") + struct.pack("<IQ", 8, 2**23), keys=1), "'k'"),
    "bad UTF-8": (container(text(b"k") + struct.pack("<I", 8) + text(b"\xff"), keys=1), "UTF-8"),
    "array count": (
        container(text(b"k") + struct.pack("<IIQ", 9, 4, HUGE), keys=1),
        "element count of 'k'",
    ),
    "array longer than the file": (
        container(text(b"k") + struct.pack("<IIQ", 9, 12, 1 << 20), keys=1),
        "'k'",
    ),
    "nested arrays": (container(text(b"k") + struct.pack("<IIQ", 9, 9, 1), keys=1), "arrays"),
    "string in array": (
        container(text(b"k") + struct.pack("<IIQQ", 9, 8, 1, HUGE), keys=1),
        "'k'",
    ),
    "duplicate key": (container((text(b"k") + struct.pack("<IB", 0, 1)) * 2, keys=2), "twice"),
    "alignment 0": (
        container(text(b"general.alignment") + struct.pack("<II", 4, 0), keys=1),
        "alignment",
    ),
    "alignment 48": (
        container(text(b"general.alignment") + struct.pack("<II", 4, 48), keys=1),
        "alignment",
    ),
    "duplicate tensor": (container(tensors=tensor_info() * 2 + bytes(256), count=2), "twice"),
    "no dimensions": (container(tensors=tensor_info(()), count=1), "number of dimensions"),
    "five dimensions": (container(tensors=tensor_info((1,) * 5), count=1), "dimensions"),
    "dimension 0": (container(tensors=tensor_info((0, 4)), count=1), "dimensions"),
    "overflowing dimensions": (
        container(tensors=tensor_info((2**32, 2**32, 2**32, 2**32)) + bytes(64), count=1),
        "data of tensor 't'",
    ),
    "wrapping size": (
        container(tensors=tensor_info((2**62, 4)) + bytes(64), count=1),
        "data of tensor 't'",
    ),
    "unknown type": (container(tensors=tensor_info(kind=77), count=1), "number 77"),
    "unsupported type": (container(tensors=tensor_info(kind=20), count=1), "IQ4_NL"),
    "part of a block": (container(tensors=tensor_info((33,), 2), count=1), "row length"),
    "offset behind the file": (
        container(tensors=tensor_info(offset=2**63) + bytes(256), count=1),
        "data of tensor 't'",
    ),
    "unaligned offset": (container(tensors=tensor_info(offset=8) + bytes(256), count=1), "offset"),
    "newline in a name": (container(tensors=tensor_info((0,), name=b"a\nb"), count=1), r"a\nb"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_containers(tmp_path: Path, case: str) -> None:
    content, named = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    assert named in refusal(path)


def test_version_2_and_scalar_types(tmp_path: Path) -> None:
    values = [
        (0, "B", 7), (1, "b", -7), (2, "H", 65535), (3, "h", -2), (4, "I", 2**32 - 1), (5, "i", -5),
        (6, "f", 0.5), (7, "?", True), (10, "Q", 2**64 - 1), (11, "q", -(2**63)), (12, "d", 1e300),
    ]  # fmt: skip
    metadata = b"".join(
        text(f"k{code}".encode()) + struct.pack(f"<I{letter}", code, value)
        for code, letter, value in values
    )
    content = container(metadata, keys=len(values))
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:4] + struct.pack("<I", 2) + content[8:])
    assert GGUFFile(path).metadata == {f"k{code}": value for code, _, value in values}


def test_pipes_and_missing_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "regular" in refusal(tmp_path / "pipe.gguf")
    assert "can't be opened" in refusal(tmp_path / "missing.gguf")
    with pytest.raises(ModelFileError, match="no such file"):
        open_checkpoint(tmp_path / "missing.gguf")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_checkpoint(tmp_path / "folder")
