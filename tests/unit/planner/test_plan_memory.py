"""KV memory: the worked numbers, and byte for byte what the engine allocates."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.kv_cache_manager import KVCacheManager
from poise.core.output import EngineSampling
from poise.core.request import Request
from poise.core.sampling_params import SamplingParams
from poise.errors import ConfigError
from poise.models import cost
from poise.planner.memory import Demand, KVLayers, Pages, check_shape, plan
from poise.planner.model import SHAPES

GIB = 2**30
LLAMA_2_7B = KVLayers((None,) * 32, 32, 128)


def report(tokens: int, sequences: int = 1, layers: KVLayers = LLAMA_2_7B, **demand: object):
    return plan("test", layers, 16, Demand(tokens, sequences, **demand))  # type: ignore[arg-type]


def test_the_worked_numbers() -> None:
    """32 layers × 32 KV heads × 128 × 2 bytes."""
    assert report(1).value("kv_bytes_per_token") == 524_288
    assert report(2048).value("kv_bytes_per_sequence") == 1 * GIB
    assert report(2048).value("allocated_bytes_per_sequence") == 1 * GIB
    assert report(2048, 40).value("kv_bytes") == 40 * GIB
    assert report(2048, 40).value("allocated_bytes") == 40 * GIB
    assert report(32_768).value("kv_bytes_per_sequence") == 16 * GIB


def test_sizes_are_written_in_both_kinds_of_units() -> None:
    text = "\n".join(report(2048, 40).as_text())
    assert "524,288 B/token = 512 KiB/token = 524.288 kB/token" in text
    assert "42,949,672,960 B = 40 GiB = 42.9497 GB" in text


def test_the_tail_of_the_last_block_is_waste() -> None:
    answer = report(2049)
    assert answer.value("blocks_per_sequence") == 129
    assert answer.value("waste_bytes_per_sequence") == 15 * 524_288
    by_size = {row[0]: row for row in answer.tables[1].rows}
    assert [by_size[size][1] for size in (16, 32, 64)] == [129, 65, 33]
    assert [by_size[size][3] for size in (16, 32, 64)] == [15 * 524_288, 31 * 524_288, 63 * 524_288]


def test_what_fits_a_memory() -> None:
    answer = report(2048, 4, weights=(14 * GIB, "given"), memory=30 * GIB)
    assert answer.value("room_bytes") == 16 * GIB
    assert answer.value("most_sequences") == 16
    assert answer.value("longest_context") == 8192
    nothing = report(2048, 4, weights=(40 * GIB, "given"), memory=30 * GIB)
    assert nothing.value("room_bytes") == 0
    assert nothing.value("most_sequences") == 0
    assert nothing.value("longest_context") == 0


def test_the_longest_context_ends_at_the_models_own() -> None:
    assert report(2048, memory=10**15, context=4096).value("longest_context") == 4096


def test_a_shared_prefix_is_held_once() -> None:
    answer = report(2048, 40, shared_prefix=1000)
    assert answer.value("allocated_bytes") == (62 + 40 * (128 - 62)) * 16 * 524_288
    assert answer.value("saved_bytes") == 39 * 62 * 16 * 524_288


def test_sliding_windows_stop_growing_and_shared_layers_keep_nothing() -> None:
    layers = KVLayers((None,) * 3 + (512,) * 15, 1, 256, num_shared=2)
    answer = report(10_000, layers=layers)
    each = 2 * 256 * 2
    assert answer.value("kv_bytes_per_token") == 18 * each
    assert answer.value("kv_bytes_per_sequence") == each * (3 * 10_000 + 15 * 512)
    kinds = answer.tables[0].rows
    assert [row[:4] for row in kinds] == [
        ["full", 3, 3 * each, 10_000],
        ["sliding window of 512", 15, 15 * each, 512],
        ["shared (use another layer's)", 2, 0, None],
    ]


def test_int8_counts_the_scale_of_each_token_and_head() -> None:
    layers = KVLayers((None,) * 30, 3, 64, "int8")
    answer = report(100, layers=layers)
    assert answer.value("kv_bytes_per_token") == 2 * 30 * 3 * (64 + 4)
    assert answer.value("allocated_bytes") == 7 * 16 * 2 * 30 * 3 * (64 + 4)
    assert "\n".join(answer.as_text()).count("Scales of int8") == 0
    other = report(100, layers=KVLayers((None,), 1, 64, "fp8"))
    assert "Scales of fp8 are not counted." in "\n".join(other.as_text())


def test_int4_values_are_half_bytes() -> None:
    layers = KVLayers((None,), 1, 1, "int4")
    assert report(3, layers=layers).value("kv_bytes_per_sequence") == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 64, None), "is the number of query heads of llama-3.1-70b; it has 8 KV heads"),
        ((None, 9, None), "--kv-heads is 9, llama-3.1-70b has 8"),
        ((79, None, None), "--layers is 79, llama-3.1-70b has 80"),
        ((None, None, 64), "--head-dim is 64, llama-3.1-70b has 128"),
    ],
)
def test_numbers_that_contradict_the_model_are_refused(
    given: tuple[int | None, int | None, int | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_shape("llama-3.1-70b", SHAPES["llama-3.1-70b"][0], *given)
    check_shape("llama-3.1-70b", SHAPES["llama-3.1-70b"][0], 80, 8, 128)


def test_a_prefix_longer_than_the_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="--shared-prefix is 17, longer than --tokens 16"):
        report(16, shared_prefix=17)


shapes = st.builds(
    KVLayers,
    windows=st.builds(
        lambda full, sliding, window: (None,) * full + (window,) * sliding,
        st.integers(1, 4),
        st.integers(0, 6),
        st.integers(1, 100),
    ),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([16, 64, 128]),
)


@settings(deadline=None)
@given(shapes, st.integers(1, 600), st.integers(1, 64), st.sampled_from([16, 32, 64]))
def test_no_sequence_ever_holds_more_than_planned(
    layers: KVLayers, num_tokens: int, chunk: int, block_size: int
) -> None:
    """Walks one request through the engine's own page manager, chunk by chunk."""
    pages = Pages(layers, block_size, chunk)
    manager = KVCacheManager(cost.kv_groups(layers.windows).specs, 10_000, block_size, None)
    sampling = EngineSampling(SamplingParams(), 0, 0, frozenset())
    request = Request.create(0, [0] * num_tokens, sampling, 1, 0.0)
    most = 0
    while request.num_computed_tokens < num_tokens:
        step = min(chunk, num_tokens - request.num_computed_tokens)
        assert manager.allocate(request, step, None) is not None
        most = max(most, manager.pool.num_blocks - manager.pool.num_free)
        request.num_computed_tokens += step
    assert most <= pages.blocks(num_tokens)
    if all(window is None for window in layers.windows):
        assert most == pages.blocks(num_tokens)


@settings(deadline=None)
@given(shapes, st.integers(1, 10**6), st.integers(1, 1000), st.integers(1, 10**12))
def test_what_is_said_to_fit_fits_and_one_more_does_not(
    layers: KVLayers, tokens: int, sequences: int, memory: int
) -> None:
    answer = report(tokens, sequences, layers, memory=memory)
    pages = Pages(layers, 16, 512)
    count, longest = answer.value("most_sequences"), answer.value("longest_context")
    assert pages.blocks_of_all(tokens, count, 0) * pages.page_bytes <= memory
    assert pages.blocks_of_all(tokens, count + 1, 0) * pages.page_bytes > memory
    if longest:
        assert pages.blocks_of_all(longest, sequences, 0) * pages.page_bytes <= memory


@settings(deadline=None)
@given(shapes)
def test_groups_are_of_one_size_and_hold_every_layer_once(layers: KVLayers) -> None:
    groups = cost.kv_groups(layers.windows)
    assert len(groups.specs) <= cost.MAX_KV_GROUPS
    assert max(group.num_layers for group in groups.specs) == groups.layers_per_page
    found = [g.sliding_window for g in groups.specs for _ in range(g.num_layers)]
    assert sorted(found, key=str) == sorted(layers.windows, key=str)
    assert len(set(groups.places)) == len(layers.windows)
    for window, (group, place) in zip(layers.windows, groups.places, strict=True):
        assert groups.specs[group].sliding_window == window
        assert place < groups.specs[group].num_layers
