"""The plan against an engine that is really loaded: the same bytes of KV."""

from __future__ import annotations

from pathlib import Path

import pytest

from poise.config import CacheConfig, ComputeConfig, SchedulerConfig
from poise.executor.load import load_executor
from poise.planner.memory import Demand, KVLayers, plan
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, write_gguf


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_the_engine_allocates_what_was_planned(tmp_path: Path, block_size: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, TinyModel(), "Q8_0")
    checkpoint = open_checkpoint(path)
    layers = KVLayers.of(checkpoint.config)
    report = plan("tiny", layers, block_size, Demand(num_tokens=100, num_sequences=3))
    planned = report.value("allocated_bytes")
    loaded = load_executor(
        checkpoint,
        CacheConfig(block_size=block_size, memory_bytes=planned),
        SchedulerConfig(max_num_seqs=3),
        ComputeConfig(threads=1),
    )
    assert loaded.kv_cache.num_bytes == planned
    assert loaded.num_blocks == 3 * report.value("blocks_per_sequence")
