"""Quality of tiny models: tiles are what one step would give, float arithmetic costs nothing, faults are failures."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from poise.config import CacheConfig, ComputeConfig, SchedulerConfig
from poise.errors import ConfigError, PoiseError
from poise.executor.load import load_executor
from poise.kernels.reference import ReferenceBackend
from poise.tokenizer.tokenizer import Tokenizer
from poise.verify.quality import measure_quality
from poise.verify.quality_logits import NativeLogits, ReferenceLogits
from poise.verify.quality_texts import TEXT_NAMES, WINDOW, Text, read_text, windows_of
from poise.weights.open_checkpoint import open_checkpoint
from reference_forward import build, kv_shape, one_sequence
from tiny_models import TinyModel, byte_tokens, write_gguf

TEXT = Text("short", "The quick brown fox jumps over the lazy dog. " * 30, judged=True)
MERGED = ("tokenizer.ggml.tokens", [*byte_tokens(287), "ab"])  # what the one merge makes
CACHE, COMPUTE = CacheConfig(), ComputeConfig(threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quality")


def tiny(folder: Path, matrix_type: str, context: int = 512) -> Path:
    model = TinyModel(max_position_embeddings=context, seed=5)
    return write_gguf(
        folder / f"{matrix_type}-{context}.gguf", model, matrix_type, metadata=[MERGED]
    )


def test_tiles_are_the_rows_of_one_step(folder: Path) -> None:
    checkpoint = open_checkpoint(tiny(folder, "F32"))
    window = np.random.default_rng(0).integers(3, 288, 150).astype(np.int32)
    backend = ReferenceBackend(kv_shape(checkpoint.config, 160), "f32")
    step = one_sequence(window[:-1], wanted=range(69, 149), num_blocks=10)
    expected = backend.run(step, build(backend, checkpoint))
    limits = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=160, max_model_len=160)
    loaded = load_executor(checkpoint, CACHE, limits, COMPUTE)
    for model, tolerance in (
        (ReferenceLogits(checkpoint, 160), 1e-4),
        (NativeLogits(loaded, 160), 0.05),  # K and V in bf16
    ):
        tiles = [tile.copy() for tile in model.tiles(window, 70)]
        assert [len(tile) for tile in tiles] == [32, 32, 16]
        np.testing.assert_allclose(np.concatenate(tiles), expected, atol=tolerance)


def test_quantised_activations_cost_more_than_float_ones(folder: Path) -> None:
    kls = []
    for matrix_type in ("F32", "Q4_0"):
        checkpoint = open_checkpoint(tiny(folder, matrix_type))
        record = measure_quality(checkpoint, CACHE, COMPUTE, [TEXT], num_windows=1)
        [text] = record.texts
        assert (text.num_windows, text.num_tokens) == (1, 256)
        assert text.sha256 == hashlib.sha256(TEXT.content.encode()).hexdigest()
        assert record.model_digest == checkpoint.digest()
        kls.append(text.kl.value)
    assert 0 < 2 * kls[0] < kls[1] < 0.1


def test_a_target_that_is_missed_is_told(folder: Path) -> None:
    checkpoint = open_checkpoint(tiny(folder, "Q4_0"))
    record = measure_quality(checkpoint, CACHE, COMPUTE, [TEXT], num_windows=1, max_kl=1e-9)
    assert any("mean KL" in line for line in record.failures)


def test_what_can_not_be_measured_is_an_error(folder: Path) -> None:
    short = open_checkpoint(tiny(folder, "F32", context=256))
    with pytest.raises(ConfigError, match="made for 256 tokens"):
        measure_quality(short, CACHE, COMPUTE, [TEXT], num_windows=1)
    checkpoint = open_checkpoint(tiny(folder, "F32"))
    small = CacheConfig(memory_bytes=65_536)
    with pytest.raises(ConfigError, match="hold no window of 512 tokens"):
        measure_quality(checkpoint, small, COMPUTE, [TEXT], num_windows=1)
    with pytest.raises(PoiseError, match="fewer than 512"):
        measure_quality(checkpoint, CACHE, COMPUTE, [Text("x", "x", True)], num_windows=1)


def test_windows_do_not_overlap_and_begin_with_bos_where_wanted(folder: Path) -> None:
    plain = Tokenizer(open_checkpoint(tiny(folder, "F32")).tokenizer)
    windows = windows_of(TEXT, plain, 9)
    assert windows.shape == (2, WINDOW)
    ids = plain.encode(TEXT.content, add_special_tokens=False)
    assert windows.reshape(-1).tolist() == ids[: 2 * WINDOW]
    path = write_gguf(
        folder / "bos.gguf",
        TinyModel(),
        "F32",
        metadata=[MERGED, ("tokenizer.ggml.add_bos_token", True)],
    )
    windows = windows_of(TEXT, Tokenizer(open_checkpoint(path).tokenizer), 1)
    assert windows[0].tolist() == [1, *ids[: WINDOW - 1]]


@pytest.mark.parametrize("name", TEXT_NAMES)
def test_the_texts_are_there(name: str) -> None:
    assert len(read_text(name).content) > 8000
