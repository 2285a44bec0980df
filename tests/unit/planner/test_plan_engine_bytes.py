"""The plan against an engine that is really loaded: the same bytes of KV."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from poise.config import CacheConfig, ComputeConfig, SchedulerConfig
from poise.executor.kv_cache import plan_kv_cache
from poise.executor.load import load_executor
from poise.executor.model_runner import ModelRunner
from poise.planner.memory import Demand, KVLayers, plan
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, write_safetensors_folder

MODELS = {
    "full": TinyModel(),
    "windows": TinyModel(architecture="gemma3", num_layers=7, window_period=3, sliding_window=40),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_the_engine_allocates_what_was_planned(
    tmp_path: Path, kind: str, block_size: int, dtype: Literal["bf16", "int8"]
) -> None:
    checkpoint = open_checkpoint(write_safetensors_folder(tmp_path / "tiny", MODELS[kind]))
    layers = KVLayers.of(checkpoint.config, dtype)
    report = plan(kind, layers, block_size, Demand(num_tokens=500, num_sequences=3))
    planned = report.value("allocated_bytes")
    loaded = load_executor(
        checkpoint,
        CacheConfig(block_size=block_size, memory_bytes=planned, dtype=dtype),
        SchedulerConfig(max_num_seqs=3),
        ComputeConfig(threads=1),
    )
    assert loaded.kv_cache.num_bytes == planned
    assert isinstance(loaded.executor, ModelRunner)
    pages = loaded.executor._backend.pages
    assert pages.page_bytes * pages.num_blocks == planned
    assert loaded.num_blocks == 3 * report.value("blocks_per_sequence")


@pytest.mark.parametrize("kind", MODELS)
def test_the_engine_sizes_its_pool_for_the_same_sequences(tmp_path: Path, kind: str) -> None:
    """Without a size given, the pool is what all sequences of the model's context could use."""
    checkpoint = open_checkpoint(write_safetensors_folder(tmp_path / "tiny", MODELS[kind]))
    config = checkpoint.config
    context = config.max_position_embeddings
    report = plan(kind, KVLayers.of(config), 16, Demand(num_tokens=context, num_sequences=5))
    chunk = SchedulerConfig().max_num_batched_tokens
    pool = plan_kv_cache(config, CacheConfig(), 5, context, chunk, available_bytes=None)
    assert pool.num_bytes == report.value("allocated_bytes")
