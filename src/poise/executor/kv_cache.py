"""How many KV pages there are and what one holds: exact bytes from the model's shape, within what the machine allows.

Knows shapes and budgets, not requests. One page holds `block_size` tokens of the layers of one KV group.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from poise.config import CacheConfig
from poise.core.kv_cache_manager import KVCacheManager
from poise.errors import ConfigError
from poise.models.config import ModelConfig
from poise.models.cost import (
    KV_FORMATS,
    KVGroups,
    kv_bytes_per_layer_token,
    kv_groups,
    layer_windows,
)

SHARE_OF_MEMORY = 0.4  # of what cgroup and machine still allow, where no size was asked for


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """`num_blocks` pages of `page_bytes`, each of `block_size` tokens. `max_chunk`: the most tokens of a sequence in a step."""

    groups: KVGroups
    block_size: int
    num_blocks: int
    page_bytes: int
    max_chunk: int
    reason: str

    @property
    def num_tokens(self) -> int:
        """Of the longest sequence that the pages hold."""

        def pages(num_blocks: int) -> int:
            return blocks_of_sequence(
                self.groups, num_blocks * self.block_size, self.max_chunk, self.block_size
            )

        longest = bisect_right(range(self.num_blocks + 1), self.num_blocks, key=pages) - 1
        return longest * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_blocks


def blocks_of_sequence(groups: KVGroups, num_tokens: int, max_chunk: int, block_size: int) -> int:
    """The most pages of all groups that a sequence of `num_tokens` holds at once."""
    manager = KVCacheManager(groups.specs, 1, block_size, None)
    return manager.num_blocks_needed(num_tokens, max_chunk)


def plan_kv_cache(
    config: ModelConfig,
    cache: CacheConfig,
    max_num_seqs: int,
    max_model_len: int,
    max_chunk: int,
    available_bytes: int | None,
) -> KVCachePlan:
    """Sizes the pool: what was asked for, or the smaller of 40 % of `available_bytes` and what all sequences could use.

    `max_chunk`: the most tokens of a sequence in one step. `available_bytes=None` (the system does not tell) leaves only
    the second. Raises ConfigError where not even one page fits.
    """
    groups = kv_groups(layer_windows(config))
    layer_bytes = int(kv_bytes_per_layer_token(config, KV_FORMATS[cache.kv_dtype]))
    page_bytes = layer_bytes * groups.layers_per_page * cache.block_size
    usable = max_num_seqs * blocks_of_sequence(groups, max_model_len, max_chunk, cache.block_size)
    if cache.memory_bytes is not None:
        num_blocks = cache.memory_bytes // page_bytes
        reason = f"--kv-cache-memory-bytes {cache.memory_bytes}"
    else:
        num_blocks = usable
        if available_bytes is not None:
            num_blocks = min(usable, int(available_bytes * SHARE_OF_MEMORY) // page_bytes)
        reason = (
            f"{max_num_seqs} sequences of {max_model_len} tokens"
            if num_blocks == usable
            else f"{SHARE_OF_MEMORY:.0%} of the memory still available"
        )
    if num_blocks < 1:
        asked = cache.memory_bytes if cache.memory_bytes is not None else available_bytes
        raise ConfigError(
            f"{asked} bytes of KV cache hold no page of {page_bytes} bytes; give --kv-cache-memory-bytes more"
        )
    return KVCachePlan(groups, cache.block_size, num_blocks, page_bytes, max_chunk, reason)
