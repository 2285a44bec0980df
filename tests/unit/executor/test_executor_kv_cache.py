"""The arithmetic of the KV pool: exact bytes, and which limit decided."""

from __future__ import annotations

import pytest

from poise.config import CacheConfig
from poise.errors import ConfigError
from poise.executor.kv_cache import kv_bytes_per_token, plan_kv_cache
from poise.models.config import ModelConfig, RopeConfig

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


def test_bytes_per_token():
    assert kv_bytes_per_token(CONFIG) == 23_040


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_what_was_asked_for_is_filled_with_whole_pages(block_size):
    plan = plan_kv_cache(CONFIG, CacheConfig(block_size, GIB), 1, 16, available_bytes=1)
    page = 23_040 * block_size
    assert plan.page_bytes == page
    assert plan.num_blocks == GIB // page
    assert plan.num_bytes == page * plan.num_blocks <= GIB < plan.num_bytes + page
    assert plan.num_tokens == block_size * plan.num_blocks
    assert plan.reason == "--kv-cache-memory-bytes 1073741824"


def test_no_more_than_all_sequences_can_use():
    plan = plan_kv_cache(CONFIG, CacheConfig(), 4, 1000, available_bytes=1 << 50)
    assert plan.num_blocks == 4 * 63  # 1000 tokens need 63 blocks of 16
    assert plan.reason == "4 sequences of 1000 tokens"


def test_two_fifths_of_what_is_left():
    plan = plan_kv_cache(CONFIG, CacheConfig(), 64, 8192, available_bytes=GIB)
    assert plan.num_blocks == 429_496_729 // PAGE == 1165
    assert plan.reason == "40% of the memory still available"


def test_a_system_that_does_not_tell():
    plan = plan_kv_cache(CONFIG, CacheConfig(), 2, 100, available_bytes=None)
    assert plan.num_blocks == 2 * 7


@pytest.mark.parametrize(
    ("asked", "available"), [(PAGE - 1, None), (None, PAGE * 2), (None, 0), (None, 1)]
)
def test_room_for_no_page_is_refused(asked, available):
    with pytest.raises(ConfigError, match=str(asked or available)):
        plan_kv_cache(CONFIG, CacheConfig(memory_bytes=asked), 64, 8192, available)


def test_room_for_exactly_one_page():
    assert plan_kv_cache(CONFIG, CacheConfig(memory_bytes=PAGE), 64, 8192, None).num_blocks == 1
