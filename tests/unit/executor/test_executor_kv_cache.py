"""The arithmetic of the KV pool: exact bytes, and which limit decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from poise.config import CacheConfig
from poise.core.kv_cache_manager import KVCacheManager
from poise.errors import ConfigError
from poise.executor.kv_cache import AHEAD_BYTES, SLICE_BYTES, PagesAhead, plan_kv_cache
from poise.models.config import ModelConfig, RopeConfig
from poise.models.cost import kv_groups, layer_windows

GIB = 1 << 30
# smollm2-135m: 2 · 30 layers · 3 KV heads · 64 · 2 bytes = 23,040 bytes per token.
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    rope=RopeConfig(1e5, 64),
    tie_word_embeddings=True,
)
PAGE = 23_040 * 16
CHUNK = 2048


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_what_was_asked_for_is_filled_with_whole_pages(block_size):
    plan = plan_kv_cache(CONFIG, CacheConfig(block_size, GIB), 1, 16, CHUNK, available_bytes=1)
    page = 23_040 * block_size
    assert plan.page_bytes == page
    assert plan.num_blocks == GIB // page
    assert plan.num_bytes == page * plan.num_blocks <= GIB < plan.num_bytes + page
    assert plan.num_tokens == block_size * plan.num_blocks
    assert plan.reason == "--kv-cache-memory-bytes 1073741824"


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_pages_of_int8_hold_a_scale_for_each_token_and_head(block_size):
    cache = CacheConfig(block_size, GIB, dtype="int8")
    plan = plan_kv_cache(CONFIG, cache, 1, 16, CHUNK, available_bytes=1)
    assert plan.page_bytes == 2 * 30 * 3 * (64 + 4) * block_size
    assert plan.num_blocks == GIB // plan.page_bytes


def test_no_more_than_all_sequences_can_use():
    plan = plan_kv_cache(CONFIG, CacheConfig(), 4, 1000, CHUNK, available_bytes=1 << 50)
    assert plan.num_blocks == 4 * 63  # 1000 tokens need 63 blocks of 16
    assert plan.reason == "4 sequences of 1000 tokens"


def test_two_fifths_of_what_is_left():
    plan = plan_kv_cache(CONFIG, CacheConfig(), 64, 8192, CHUNK, available_bytes=GIB)
    assert plan.num_blocks == 429_496_729 // PAGE == 1165
    assert plan.reason == "40% of the memory still available"


def test_a_system_that_does_not_tell():
    plan = plan_kv_cache(CONFIG, CacheConfig(), 2, 100, CHUNK, available_bytes=None)
    assert plan.num_blocks == 2 * 7


@pytest.mark.parametrize(
    ("asked", "available"), [(PAGE - 1, None), (None, PAGE * 2), (None, 0), (None, 1)]
)
def test_room_for_no_page_is_refused(asked, available):
    with pytest.raises(ConfigError, match=str(asked or available)):
        plan_kv_cache(CONFIG, CacheConfig(memory_bytes=asked), 64, 8192, CHUNK, available)


def test_room_for_exactly_one_page():
    assert (
        plan_kv_cache(CONFIG, CacheConfig(memory_bytes=PAGE), 64, 8192, CHUNK, None).num_blocks == 1
    )


def sliding(num_layers, period=6, window=512):
    windows = tuple(None if (i + 1) % period == 0 else window for i in range(num_layers))
    return replace(CONFIG, num_layers=num_layers, windows=windows)


@pytest.mark.parametrize(
    ("num_layers", "layers_per_page", "num_groups"),
    [(18, 3, 6), (26, 4, 7), (34, 5, 7), (48, 8, 6), (62, 10, 7)],
)
def test_groups_of_equal_size(num_layers, layers_per_page, num_groups):
    """Gemma 3 in its five sizes; every layer has a place of its own in the pages of a group that sees as far."""
    config = sliding(num_layers)
    groups = kv_groups(config.windows)
    assert (groups.layers_per_page, len(groups.specs)) == (layers_per_page, num_groups)
    assert len(set(groups.places)) == num_layers
    for layer, (group, place) in enumerate(groups.places):
        assert groups.specs[group].sliding_window == config.windows[layer]
        assert place < groups.specs[group].num_layers <= layers_per_page
    assert groups.specs[0].sliding_window is None


def test_a_model_without_windows_has_one_group():
    groups = kv_groups(layer_windows(CONFIG))
    assert groups.layers_per_page == 30
    assert [spec.num_layers for spec in groups.specs] == [30]
    assert groups.places == tuple((0, layer) for layer in range(30))


@pytest.mark.parametrize("num_pages", [1, 5, 6, 7, 999, 1000, 10_000])
def test_the_longest_sequence_is_what_the_manager_would_take(num_pages):
    config = sliding(18)
    page = 2 * 3 * 3 * 64 * 2 * 16
    plan = plan_kv_cache(config, CacheConfig(16, page * num_pages), 4, 32768, CHUNK, None)
    assert (plan.page_bytes, plan.num_blocks) == (page, num_pages)
    manager = KVCacheManager(plan.groups.specs, num_pages, 16, None)
    assert manager.num_blocks_needed(plan.num_tokens, CHUNK) <= num_pages
    assert manager.num_blocks_needed(plan.num_tokens + 1, CHUNK) > num_pages


def test_pages_are_made_ready_ahead_of_use_slice_by_slice():
    page_bytes = SLICE_BYTES // 4
    ready: list[tuple[int, int]] = []
    assert AHEAD_BYTES // page_bytes == 1024
    ahead = PagesAhead(lambda first, count: ready.append((first, count)), 3000, page_bytes)
    while ahead.prepare(0):
        pass
    assert ready == [(first, 4) for first in range(0, 1024, 4)]
    ready.clear()
    assert not ahead.prepare(3)  # as far as they go
    assert ready == [(1024, 3)]
    assert not ahead.prepare(3)
    assert len(ready) == 1
    assert ahead.prepare(2995)  # far beyond what was ready
    assert not ahead.prepare(2995)
    assert ready[1:] == [(2995, 4), (2999, 1)]
    assert not ahead.prepare(3000)


def test_a_page_larger_than_a_slice_is_made_ready_whole():
    ready: list[tuple[int, int]] = []
    ahead = PagesAhead(lambda first, count: ready.append((first, count)), 2, 2 * SLICE_BYTES)
    assert ahead.prepare(0)
    assert not ahead.prepare(0)
    assert ready == [(0, 1), (1, 1)]
