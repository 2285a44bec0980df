"""`poise inspect`, `env`, `models` and `pull`: what they report, for people and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from poise import __version__
from poise.cli.inspect import describe, inspect_checkpoint, memory_budget
from poise.cli.main import run
from poise.cli.sizes import binary_size
from poise.models.config import ModelConfig, RopeConfig, TokenizerData
from poise.weights.checkpoint import RawTensor

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    rope=RopeConfig(10_000.0, 16),
    tie_word_embeddings=True,
)
SHAPES = {"embed": (100, 64), "norm": (64,)} | {
    f"layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {"attn_norm": (64,), "q": (64, 64), "k": (32, 64), "v": (32, 64)}.items()
}


TOKENIZER = TokenizerData(
    gguf={"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}, chat_template="x"
)


@dataclass
class FakeCheckpoint:
    path: Path = Path("tiny.gguf")
    name: str = "tiny"
    format: str = "GGUF Q4_1"
    config: ModelConfig = CONFIG
    tokenizer: TokenizerData = TOKENIZER

    def has(self, name: str) -> bool:
        return name in SHAPES

    def tensor(self, name: str) -> RawTensor:
        shape = SHAPES[name]
        kind = "F32" if len(shape) == 1 else "Q4_1"
        return RawTensor(name, kind, shape, np.zeros((1, 1), np.uint8))

    def weight_bytes(self) -> int:
        return 4096

    def digest(self) -> str:
        return "d" * 64


def test_inspect_counts_tensors_parameters_and_bytes() -> None:
    facts = inspect_checkpoint(FakeCheckpoint())
    assert facts["tensor_types"] == {"Q4_1": 7, "F32": 3}
    assert facts["parameters"] == 100 * 64 + 64 + 2 * (64 + 64 * 64 + 2 * 32 * 64)
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert facts["tokenizer"] == "GGUF gpt2, pre-tokeniser smollm"
    json.dumps(facts)


def test_inspect_tells_people_the_same() -> None:
    checkpoint = FakeCheckpoint()
    text = "\n".join(describe(inspect_checkpoint(checkpoint), memory_budget(checkpoint)))
    for fact in (
        "llama",
        "7 Q4_1, 3 F32",
        "4,096 B = 4 KiB = 4.096 kB",
        "256 B/token",
        "KV of 512 tokens",
        "131,072 B/sequence = 128 KiB/sequence = 131.072 kB/sequence",
    ):
        assert fact in text


def test_inspect_of_a_damaged_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + b"\xff" * 60)
    assert run(["inspect", str(file)]) == 1
    error = capsys.readouterr().err
    assert str(file) in error
    assert error.count("\n") == 1


def test_env_reports_versions_limits_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POISE_HOME", str(tmp_path))
    assert run(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["poise"] == __version__
    assert report["threads"] >= 1
    assert report["packages"]["numpy"] == np.__version__
    assert report["models"] == {}
    assert run(["env"]) == 0
    table = capsys.readouterr().out
    for key in ("poise", "isa", "threads", "available_memory_bytes", "python", "packages numpy"):
        assert f"\n{key} " in "\n" + table


def test_models_lists_what_can_be_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POISE_HOME", str(tmp_path))
    assert run(["models", "--json"]) == 0
    [first, *_] = json.loads(capsys.readouterr().out)
    assert first["name"] == "smollm2-135m"
    assert first["licence"] == "Apache-2.0"
    assert first["cached"] is False
    assert run(["models"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


def test_offline_and_not_pulled_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POISE_HOME", str(tmp_path))
    assert run(["inspect", "smollm2-135m", "--offline"]) == 2
    error = capsys.readouterr().err
    assert "smollm2-135m" in error
    assert error.count("\n") == 1


def test_a_reader_who_leaves_is_no_crash() -> None:
    program = "import sys; from poise.cli.main import run; sys.exit(run(['serve', '--explain']))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (98_362_432, "93.8 MiB"),
        (2**30, "1.00 GiB"),
        (5 * 2**40, "5,120.00 GiB"),
    ],
)
def test_sizes_in_binary_units(num_bytes: int, text: str) -> None:
    assert binary_size(num_bytes) == text
