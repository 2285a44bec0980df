"""How many KV pages there are and what one holds: exact bytes from the model's shape, within what the machine allows.

Knows shapes and budgets, not requests. One page holds `block_size` tokens of the layers of one KV group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from poise.config import CacheConfig, KVCacheDtype
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.output import KVGroupSpec
from poise.errors import ConfigError
from poise.kernels.ops import KVShape
from poise.models.config import ModelConfig
from poise.models.cost import (
    KV_FORMATS,
    KVGroups,
    kinds_of_layers,
    kv_bytes_per_layer_token,
    kv_groups,
    layer_windows,
)

AHEAD_BYTES: Final = 512 << 20  # of pages that are ready for whoever comes next
SLICE_BYTES: Final = (
    2 << 20
)  # a millisecond's work, or some on a machine that is new to the memory itself
SHARE_OF_MEMORY = 0.4  # of what cgroup and machine still allow, where no size was asked for


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """`num_blocks` pages of `page_bytes`, each of `block_size` tokens. `max_chunk`: the most tokens of a sequence in a step."""

    groups: KVGroups
    block_size: int
    num_blocks: int
    page_bytes: int
    max_chunk: int
    dtype: KVCacheDtype
    reason: str
    draft: KVGroups | None = None  # of a model that drafts, in pages of the same size

    @property
    def specs(self) -> tuple[KVGroupSpec, ...]:
        """Of all groups, those of a model that drafts last."""
        return self.groups.specs + (() if self.draft is None else self.draft.specs)

    def shape(self, config: ModelConfig, groups: KVGroups) -> KVShape:
        """Of the model that these groups are of, for its backend."""
        return KVShape(
            groups.layers_per_page,
            config.num_kv_heads,
            config.head_dim,
            self.block_size,
            self.num_blocks,
            groups.places,
            self.dtype,
        )

    @property
    def num_tokens(self) -> int:
        """Of the longest sequence that the pages hold."""

        def pages(num_blocks: int) -> int:
            return blocks_of_sequence(
                self.specs, num_blocks * self.block_size, self.max_chunk, self.block_size
            )

        longest = bisect_right(range(self.num_blocks + 1), self.num_blocks, key=pages) - 1
        return longest * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_blocks


def blocks_of_sequence(
    specs: Sequence[KVGroupSpec], num_tokens: int, max_chunk: int, block_size: int
) -> int:
    """The most pages of all groups that a sequence of `num_tokens` holds at once."""
    manager = KVCacheManager(specs, 1, block_size, None)
    return manager.num_blocks_needed(num_tokens, max_chunk)


def plan_kv_cache(
    config: ModelConfig,
    cache: CacheConfig,
    max_num_seqs: int,
    max_model_len: int,
    max_chunk: int,
    available_bytes: int | None,
    draft: ModelConfig | None = None,
) -> KVCachePlan:
    """Sizes the pool: what was asked for, or the smaller of 40 % of `available_bytes` and what all sequences could use.

    `max_chunk`: the most tokens of a sequence in one step. `available_bytes=None` (the system does not tell) leaves only
    the second. `draft`: a model whose KV goes into groups of its own. Raises ConfigError where not even one page fits, or
    no layer of the draft into a page.
    """
    groups = kv_groups(layer_windows(config))
    layer_bytes = int(kv_bytes_per_layer_token(config, KV_FORMATS[cache.kv_dtype]))
    page_bytes = layer_bytes * groups.layers_per_page * cache.block_size
    drafting = None if draft is None else draft_groups(draft, cache, page_bytes)
    specs = groups.specs + (() if drafting is None else drafting.specs)
    usable = max_num_seqs * blocks_of_sequence(specs, max_model_len, max_chunk, cache.block_size)
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
    return KVCachePlan(
        groups,
        cache.block_size,
        num_blocks,
        page_bytes,
        max_chunk,
        cache.kv_dtype,
        reason,
        drafting,
    )


def draft_groups(config: ModelConfig, cache: CacheConfig, page_bytes: int) -> KVGroups:
    """Groups of as many layers as a page of another model holds, each of layers with one window; raises ConfigError.

    They keep all KV, whatever the window: the draft may be far behind when it computes a position.
    """
    layer_bytes = int(kv_bytes_per_layer_token(config, KV_FORMATS[cache.kv_dtype]))
    most = page_bytes // (layer_bytes * cache.block_size)
    if most == 0:
        raise ConfigError(
            f"the KV of a layer of the drafting model takes {layer_bytes * cache.block_size} bytes a block, "
            f"a page of the target has {page_bytes}: draft with a narrower model"
        )
    windows = layer_windows(config)
    specs: list[KVGroupSpec] = []
    places = [(0, 0)] * len(windows)
    for window in kinds_of_layers(windows):
        layers = [layer for layer, own in enumerate(windows) if own == window]
        for start in range(0, len(layers), most):
            members = layers[start : start + most]
            for place, layer in enumerate(members):
                places[layer] = (len(specs), place)
            specs.append(KVGroupSpec(f"draft {len(specs)}", len(members)))
    return KVGroups(max(spec.num_layers for spec in specs), tuple(specs), tuple(places))


class PagesAhead:
    """Has memory found for the next pages while nothing runs: else a step stands still while the system clears what it writes to
    for the first time. Slice by slice, so that whoever comes waits for one slice at most.
    """

    def __init__(
        self, populate: Callable[[int, int], None], num_blocks: int, page_bytes: int
    ) -> None:
        self._populate = populate
        self._num_blocks = num_blocks
        self._num_ahead = AHEAD_BYTES // page_bytes
        self._slice = max(1, SLICE_BYTES // page_bytes)
        self._num_ready = 0

    def prepare(self, num_touched: int) -> bool:
        """Does a slice, given that `num_touched` pages are or were in use; returns whether more is left to do."""
        begin = max(self._num_ready, num_touched)
        end = min(num_touched + self._num_ahead, self._num_blocks)
        if begin < end:
            count = min(self._slice, end - begin)
            self._populate(begin, count)
            self._num_ready = begin + count
        return self._num_ready < end
