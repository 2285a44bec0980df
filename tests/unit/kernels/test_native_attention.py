"""Native rope, KV writing and attention equal the numpy reference in all bits, whatever the chunks, blocks and threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from native_ops import (
    DOT_USES,
    KV_DTYPES,
    THREADS,
    VALUE_TYPES,
    assert_same_bits,
    backend,
    decode_pages,
    encode_pages,
    hostile_rows,
    vector,
)

from poise.kernels import reference_math
from poise.kernels.ops import KVShape, RopeTable, Step
from poise.kernels.reference import ReferenceBackend

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
every_isa = pytest.mark.parametrize("isa", DOT_USES)
every_dtype = pytest.mark.parametrize("dtype", KV_DTYPES)
POISON = 0xFF


def bf16_bits(values):
    """The upper halves of values that are exactly bf16."""
    with np.errstate(over="ignore"):
        return (np.asarray(values).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def kept(content, dtype):
    """K or V as pages hold it: values, and scales of int8."""
    if dtype == "bf16":
        return bf16_bits(content), None
    with np.errstate(over="ignore"):
        return reference_math.quantise_groups(np.asarray(content).astype(np.float32))


def poisoned(kv: KVShape):
    """Pages and scales of which every byte is POISON."""
    shape = (kv.num_layers, 2, kv.num_blocks, kv.block_size, kv.num_kv_heads)
    pages = np.zeros((*shape, kv.head_dim), VALUE_TYPES[kv.dtype])
    scales = np.zeros(shape if kv.dtype == "int8" else 0, np.float32)
    for array in (pages, scales):
        array.view(np.uint8)[...] = POISON
    return pages, scales


def assert_same_pages(actual, expected, note):
    """Values and scales; those of bf16 may be different NaNs."""
    values, scales = expected
    if values.dtype == np.uint16:
        assert_same_bits(as_float(actual[0]), as_float(values), note)
    else:
        assert np.array_equal(actual[0], values), note
        assert_same_bits(actual[1], scales, note)


def sequences_step(parts, tables) -> Step:
    """parts: (first position, rows) of each sequence, with its block table in `tables`."""
    positions = [np.arange(first, first + rows) for first, rows in parts]
    width = max(len(table) for table in tables)
    rows = [count for _, count in parts]
    return Step(
        token_ids=np.zeros(sum(rows), np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_start=np.cumsum([0, *rows]).astype(np.int32),
        block_tables=np.array([np.pad(t, (0, width - len(t))) for t in tables], np.int32),
        logit_rows=np.zeros(0, np.int32),
    )


ROPE_CASES = {  # heads, KV heads, head_dim, rotary pairs, q norm, k norm
    "llama": (3, 1, 16, 8, False, False),
    "partial": (4, 2, 32, 5, False, False),
    "qwen3": (2, 2, 64, 32, True, True),
    "wide": (2, 1, 80, 40, False, True),
    "norm-q": (8, 1, 128, 20, True, False),
}


@every_dtype
@pytest.mark.parametrize("block_size", [16, 64])
@every_isa
@pytest.mark.parametrize("case", ROPE_CASES)
def test_rope_kv_write(case, isa, block_size, dtype):
    """q, K and V at near and far positions, from hostile rows; every other slot keeps its bits."""
    num_heads, num_kv_heads, head_dim, pairs, has_q_norm, has_k_norm = ROPE_CASES[case]
    random = np.random.default_rng(1)
    kv = KVShape(2, num_kv_heads, head_dim, block_size, 6, dtype=dtype)
    # Far positions go through tables that name few blocks often.
    parts = [(0, 2), (15, 3), (255, 2), (8191, 1), (100000, 1)]
    tables = [np.full(first // block_size + 2, i, np.int32) for i, (first, _) in enumerate(parts)]
    step = sequences_step(parts, tables)
    rope = RopeTable((1 / 5e5 ** (np.arange(pairs) / pairs)).astype(np.float32))
    norms = [random.normal(1, 0.5, head_dim).astype(np.float32) for _ in range(2)]
    q_norm, k_norm = (
        norm if wanted else None for norm, wanted in zip(norms, (has_q_norm, has_k_norm))
    )
    width = (num_heads + 2 * num_kv_heads) * head_dim
    rows = len(step.positions)
    qkv = hostile_rows(rows * width // 16, 16, seed=2).reshape(rows, width)
    reference = ReferenceBackend(kv)
    for array in (reference.pages, reference.scales):
        array.view(np.uint8)[...] = random.integers(0, 256, array.view(np.uint8).shape)
    before = reference.pages.copy(), reference.scales.copy()
    reference.begin(step)
    arguments = (1, num_heads, num_kv_heads, head_dim)
    expected = reference.rope_kv_write(qkv, rope, *arguments, q_norm, k_norm, 1e-6)
    for threads in THREADS:
        native = backend(isa, threads, kv)
        encode_pages(*before, native.pages, kv)
        source = native.plan.buffer(width)
        handles = [None if n is None else native.vector(vector(n)) for n in (q_norm, k_norm)]
        out = native.rope_kv_write(source, rope, *arguments, *handles, 1e-6)
        native.plan.buffer_view(source, rows)[...] = qkv
        native.run(step)
        q = native.plan.buffer_view(out, rows).view(np.uint16)
        assert_same_bits(as_float(q), expected, f"q, {threads} threads")
        expected_pages = reference.pages, reference.scales
        pages = decode_pages(native.pages, kv)
        assert_same_pages(pages, expected_pages, f"pages, {threads} threads")


@dataclass
class AttentionCase:
    """One layer of pages filled for some sequences, all else poisoned, with what attention gives for each row."""

    kv: KVShape
    num_heads: int
    pages: tuple[np.ndarray, np.ndarray]
    step: Step
    q: np.ndarray
    expected: np.ndarray
    window: int | None = None


@cache
def attention_case(
    head_dim,
    group,
    block_size,
    parts,
    num_kv_heads=1,
    seed=0,
    key_scale=1.0,
    value_scale=1.0,
    window=None,
    dtype="bf16",
) -> AttentionCase:
    """Random q, K and V of sequences `parts` (first position, rows) over shuffled blocks.

    With a window the pages behind it are gone: their table entries are -1, their content is poison.
    """
    random = np.random.default_rng(seed)
    blocks_of = [-(-(first + rows) // block_size) for first, rows in parts]
    kv = KVShape(2, num_kv_heads, head_dim, block_size, sum(blocks_of) + 3, dtype=dtype)
    free = random.permutation(kv.num_blocks)
    tables = []
    for count in blocks_of:
        tables.append(free[:count])
        free = free[count:]
    pages, scales = poisoned(kv)
    for (first, rows), table in zip(parts, tables):
        tokens = np.arange(first + rows)
        content = random.normal(0, 1, (2, len(tokens), num_kv_heads, head_dim))
        content[0, random.random(len(tokens)) < 0.1] *= 8  # scores far apart: many exp underflow
        content[0] *= key_scale
        content[1] *= value_scale
        for part in (0, 1):
            slots = (1, part, table[tokens // block_size], tokens % block_size)
            pages[slots], token_scales = kept(content[part], dtype)
            if token_scales is not None:
                scales[slots] = token_scales
        if window is not None:
            gone = table[: max(0, first - window + 1) // block_size]
            clean_pages, clean_scales = poisoned(kv)
            pages[:, :, gone] = clean_pages[:, :, gone]
            if scales.size:
                scales[:, :, gone] = clean_scales[:, :, gone]
            gone[:] = -1
    step = sequences_step(parts, tables)
    q = random.normal(0, 1, (len(step.positions), group * num_kv_heads * head_dim))
    q *= head_dim**-0.5 * np.exp(random.normal(0, 1.5, (len(q), 1)))
    q = as_float(bf16_bits(q))
    reference = ReferenceBackend(kv)
    reference.pages[...], reference.scales[...] = pages, scales
    reference.begin(step)
    expected = reference.attention(q, 1, window)
    return AttentionCase(kv, group * num_kv_heads, (pages, scales), step, q, expected, window)


def attend(case: AttentionCase, isa, threads, step=None, rows=slice(None)):
    """Native attention for `rows` of the case as `step` (or its own step) presents them."""
    step = step or case.step
    native = backend(isa, threads, case.kv, max_rows=len(case.q))
    encode_pages(*case.pages, native.pages, case.kv)
    q = native.plan.buffer(case.q.shape[1] // 2)
    native._heads[q] = (case.num_heads, case.kv.head_dim)
    out = native.attention(q, 1, case.window)
    count = len(step.positions)
    native.plan.buffer_view(q, count).view(np.uint16)[...] = bf16_bits(case.q[rows])
    native.run(step)
    return native.plan.buffer_view(out, count).copy()


CONTEXTS = (
    (14, 1),
    (15, 1),
    (16, 1),
    (62, 1),
    (63, 2),
    (64, 1),
    (254, 1),
    (255, 1),
    (256, 2),
    (512, 1),
)


@every_dtype
@every_isa
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
def test_decode_at_the_edges(head_dim, group, isa, dtype):
    """One or two rows of ten sequences whose contexts end around tiles, blocks and splits."""
    case = attention_case(head_dim, group, 16, CONTEXTS, dtype=dtype)
    assert np.isfinite(case.expected).all()
    for threads in THREADS:
        assert_same_bits(attend(case, isa, threads), case.expected, f"{threads} threads")


@every_dtype
@every_isa
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_long_contexts_are_split_and_folded(block_size, isa, dtype):
    """A single row over five splits is shared by workers; company changes who computes what."""
    parts = ((1099, 1), (0, 20), (1020, 7), (511, 1))
    case = attention_case(32, 3, block_size, parts, num_kv_heads=2, seed=1, dtype=dtype)
    for threads in THREADS:
        assert_same_bits(attend(case, isa, threads), case.expected, f"{threads} threads")
        for sequence in range(len(parts)):
            rows = slice(*case.step.query_start[sequence : sequence + 2])
            alone = sequences_step([parts[sequence]], [case.step.block_tables[sequence]])
            note = f"{threads} threads, sequence {sequence} alone"
            assert_same_bits(attend(case, isa, threads, alone, rows), case.expected[rows], note)


@every_dtype
@every_isa
@pytest.mark.parametrize("head_dim", [16, 64])
def test_prefill_whole_and_in_chunks(head_dim, isa, dtype):
    """A prompt's rows have the same bits in one step and in chunks of any size."""
    length = 300
    case = attention_case(head_dim, 3, 16, ((0, length),), seed=2, dtype=dtype)
    for threads in THREADS:
        assert_same_bits(attend(case, isa, threads), case.expected, f"whole, {threads} threads")
    for chunk in (1, 7, 15, 16, 17, 63, 64, 65, 256):
        for first in range(0, length, chunk):
            if chunk < 15 and first % 60 > 2 * chunk:
                continue  # small chunks: a few of them
            rows = slice(first, min(first + chunk, length))
            step = sequences_step([(first, rows.stop - first)], case.step.block_tables)
            note = f"chunk of {chunk} from {first}"
            assert_same_bits(
                attend(case, isa, 1 + chunk % 3, step, rows), case.expected[rows], note
            )


@every_dtype
@every_isa
def test_mixed_lengths_in_any_order(isa, dtype):
    """Prefills and decodes of several lengths in one step; the order of sequences changes no row."""
    parts = ((0, 1), (40, 30), (299, 1), (0, 65), (16, 16), (130, 2))
    case = attention_case(32, 4, 32, parts, num_kv_heads=2, seed=3, dtype=dtype)
    starts = case.step.query_start
    for order in (range(6), range(5, -1, -1), (3, 0, 5, 1, 4, 2)):
        rows = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order])
        step = sequences_step([parts[s] for s in order], case.step.block_tables[list(order)])
        for threads in THREADS:
            note = f"order {list(order)}, {threads} threads"
            assert_same_bits(attend(case, isa, threads, step, rows), case.expected[rows], note)


@every_dtype
@every_isa
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 63, 64, 65, 256, 257, 300])
def test_windows_around_tiles_blocks_and_splits(window, block_size, isa, dtype):
    """Single rows and chunks whose first visible key lies at, before and behind each kind of edge."""
    ends = [window + edge + d for edge in (16, 64, 256) for d in (-2, -1, 0)]
    parts = ((0, 1), (window - 1, 2), *((end, 1) for end in ends), (500, 130))
    case = attention_case(16, 3, block_size, parts, seed=6, window=window, dtype=dtype)
    assert np.isfinite(case.expected).all()
    for threads in THREADS:
        assert_same_bits(attend(case, isa, threads), case.expected, f"{threads} threads")
        for sequence in (3, len(parts) - 1):
            rows = slice(*case.step.query_start[sequence : sequence + 2])
            alone = sequences_step([parts[sequence]], [case.step.block_tables[sequence]])
            note = f"{threads} threads, sequence {sequence} alone"
            assert_same_bits(attend(case, isa, threads, alone, rows), case.expected[rows], note)


@every_dtype
@every_isa
@pytest.mark.parametrize("window", [40, 64, 130])
def test_windows_in_chunks(window, isa, dtype):
    """The rows of a prompt three windows long, in chunks: only what is needed is looked at."""
    length = 3 * window
    case = attention_case(64, 4, 16, ((0, length),), seed=7, window=window, dtype=dtype)
    assert_same_bits(attend(case, isa, 2), case.expected, "whole")
    table = case.step.block_tables[0]
    for chunk in (17, 64, 100):
        for first in range(0, length, chunk):
            rows = slice(first, min(first + chunk, length))
            held = table.copy()
            held[: max(0, first - window + 1) // 16] = -1
            step = sequences_step([(first, rows.stop - first)], [held])
            note = f"chunk of {chunk} from {first}"
            assert_same_bits(attend(case, isa, 3, step, rows), case.expected[rows], note)


@every_dtype
@every_isa
@pytest.mark.parametrize("key_scale", [0.0, 1e-38, 1e4, 1e37])
@pytest.mark.parametrize("value_scale", [-0.0, 1e-38, 1e-36, 1e38])
def test_scores_and_values_at_the_ends_of_the_range(key_scale, value_scale, isa, dtype):
    """Products that underflow, exps that vanish, sums that overflow, zeros of both signs."""
    parts, scales = ((66, 3), (300, 2)), {"key_scale": key_scale, "value_scale": value_scale}
    case = attention_case(16, 2, 16, parts, seed=5, dtype=dtype, **scales)
    assert_same_bits(attend(case, isa, 2), case.expected)


@every_dtype
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@every_isa
def test_a_broken_token_breaks_only_the_rows_that_see_it(part, isa, dtype):
    """A NaN in K or V of one sequence, or in its scale, leaves the other sequences' bits alone."""
    parts = ((70, 2), (70, 2), (20, 1))
    case = attention_case(16, 2, 16, parts, seed=4, dtype=dtype)
    block, offset = case.step.block_tables[0][0], 3
    pages = case.pages[0].copy(), case.pages[1].copy()
    if dtype == "bf16":
        pages[0][1, part, block, offset, 0, :] = 0x7FC0
    else:
        pages[1][1, part, block, offset, 0] = np.nan
    broken = AttentionCase(case.kv, case.num_heads, pages, case.step, case.q, case.expected)
    for threads in THREADS:
        actual = attend(broken, isa, threads)
        assert np.isnan(actual[:2]).all()
        assert_same_bits(actual[2:], case.expected[2:], f"{threads} threads")
