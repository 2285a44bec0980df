"""Sequences whose tables name the same blocks: native attention has the reference's bits, and reads shared splits once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from native_ops import DOT_USES, THREADS, assert_same_bits, backend, encode_pages
from test_native_attention import (
    AttentionCase,
    as_float,
    bf16_bits,
    kept,
    poisoned,
    sequences_step,
)

from poise.kernels.ops import SPLIT, KVShape
from poise.kernels.reference import ReferenceBackend

every_isa = pytest.mark.parametrize("isa", DOT_USES)
MAX_UNITS = 48  # query heads × rows that an item holds


@dataclass(frozen=True)
class Sequence:
    """`rows` rows from position `first`; the first `shared` tokens lie on the blocks of family `family`."""

    first: int
    rows: int = 1
    family: int = 0
    shared: int = 0


@cache
def shared_case(
    sequences, head_dim, group, block_size, num_kv_heads=1, window=None, seed=0, dtype="bf16"
) -> AttentionCase:
    """Random q, K and V; blocks that no sequence needs are poisoned, entries behind a window are -1."""
    random = np.random.default_rng(seed)
    families: dict[int, list[int]] = {}
    tables = []
    num_blocks = 3
    for sequence in sequences:
        count = -(-(sequence.first + sequence.rows) // block_size)
        num_shared = sequence.shared // block_size
        family = families.setdefault(sequence.family, [])
        for _ in range(len(family), num_shared):
            family.append(num_blocks)
            num_blocks += 1
        own = list(range(num_blocks, num_blocks + count - num_shared))
        num_blocks += len(own)
        tables.append(np.array(family[:num_shared] + own))
    names = random.permutation(num_blocks)
    tables = [names[table] for table in tables]
    kv = KVShape(2, num_kv_heads, head_dim, block_size, num_blocks, dtype=dtype)
    pages, scales = poisoned(kv)
    for sequence, table in zip(sequences, tables):
        if window is not None:
            table[: max(0, sequence.first - window + 1) // block_size] = -1
        end = sequence.first + sequence.rows
        for index in range(len(table)):
            used = min(block_size, end - index * block_size)
            if table[index] >= 0:
                content = random.normal(0, 1, (2, used, num_kv_heads, head_dim))
                slots = (1, slice(None), table[index], slice(used))
                pages[slots], token_scales = kept(content, dtype)
                if token_scales is not None:
                    scales[slots] = token_scales
    step = sequences_step([(s.first, s.rows) for s in sequences], tables)
    q = random.normal(0, 1, (len(step.positions), group * num_kv_heads * head_dim))
    q = as_float(bf16_bits(q * head_dim**-0.5 * np.exp(random.normal(0, 1.5, (len(q), 1)))))
    reference = ReferenceBackend(kv)
    reference.pages[...], reference.scales[...] = pages, scales
    reference.begin(step)
    expected = reference.attention(q, 1, window)
    assert np.isfinite(expected).all()
    return AttentionCase(kv, group * num_kv_heads, (pages, scales), step, q, expected, window)


def spared_keys(case: AttentionCase) -> int:
    """The slow twin of the plan's search: every split of every sequence of few rows, by the blocks that it lies on."""
    step, size = case.step, case.kv.block_size
    group = case.num_heads // case.kv.num_kv_heads
    sharing: Counter[tuple[int, ...]] = Counter()
    for begin, end, table in zip(step.query_start, step.query_start[1:], step.block_tables):
        if end - begin > MAX_UNITS // group // 2:
            continue
        first, last = int(step.positions[begin]), int(step.positions[end - 1])
        hidden = 0 if case.window is None else max(0, last - case.window + 1)
        for split in range(-(-hidden // SPLIT), (first + 1) // SPLIT):
            begins = 0 if case.window is None else split * SPLIT // size
            blocks = table[begins : (split + 1) * SPLIT // size]
            sharing[(split, *blocks.tolist())] += 1
    return sum((count - 1) * SPLIT for count in sharing.values())


def attend(case: AttentionCase, isa: str, threads: int) -> None:
    """Native attention with the pass and without has the expected bits; the pass fires as its twin says."""
    native = backend(isa, threads, case.kv, max_rows=len(case.q))
    encode_pages(*case.pages, native.pages, case.kv)
    q = native.plan.buffer(case.q.shape[1] // 2)
    native._heads[q] = (case.num_heads, case.kv.head_dim)
    out = native.attention(q, 1, case.window)
    spared = spared_keys(case)
    for on in (True, False, True):
        native.plan.share_prefixes = on
        native.plan.buffer_view(q, len(case.q)).view(np.uint16)[...] = bf16_bits(case.q)
        native.plan.buffer_view(out, len(case.q))[...] = np.nan
        native.run(case.step)
        actual = native.plan.buffer_view(out, len(case.q))
        assert_same_bits(actual, case.expected, f"{threads} threads, pass {on}")
        assert native.plan.spared_keys == [spared if on else 0]


@every_isa
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("shared", [240, 256, 272, 496, 512, 528])
def test_prefixes_around_splits(shared, group, isa):
    """Rows behind one prefix that ends before, at and behind the end of a split."""
    around = (254, 255, 256, 257, 510, 511, 512, 513, 530, 600)
    positions = [position for position in around if position >= shared - 1]
    sequences = [Sequence(position, shared=shared) for position in [*positions, shared + 300]]
    case = shared_case(tuple(sequences), 32, group, 16, num_kv_heads=2, seed=shared)
    assert bool(spared_keys(case)) == (shared >= SPLIT)
    for threads in THREADS:
        attend(case, isa, threads)


@every_isa
@pytest.mark.parametrize("num_sequences", [2, 3, 16, 17, 40])
def test_more_rows_than_an_item_holds(num_sequences, isa):
    sequences = [Sequence(300 + i % 7, shared=256) for i in range(num_sequences)]
    case = shared_case(tuple(sequences), 16, 3, 16, seed=num_sequences)
    assert spared_keys(case) == (num_sequences - 1) * SPLIT
    for threads in THREADS:
        attend(case, isa, threads)


@every_isa
def test_one_other_block_is_another_prefix(isa):
    """Tables that differ in one block of a split, the first, the last or one between, do not share that split."""
    whole = shared_case(tuple(Sequence(600 + i, shared=512) for i in range(5)), 16, 4, 16, seed=1)
    tables = whole.step.block_tables.copy()
    pages, scales = whole.pages[0].copy(), whole.pages[1]
    case = replace(whole, pages=(pages, scales), step=replace(whole.step, block_tables=tables))
    for sequence, column in ((1, 0), (2, 15), (3, 16 + 7)):
        own = next(block for block in range(case.kv.num_blocks) if block not in tables)
        pages[:, :, own] = pages[:, :, tables[sequence, column]]
        tables[sequence, column] = own
    assert spared_keys(case) == (3 - 1) * SPLIT + (2 - 1) * SPLIT
    for threads in THREADS:
        attend(case, isa, threads)


@every_isa
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("window", [200, 256, 300, 512, 530, 700])
def test_windows_hide_splits(window, block_size, isa):
    """A split is shared by the rows whose window has not begun to leave it; the pages behind windows are gone."""
    positions = (511, 520, 600, 767, 768, 780, 1024, 1030, 1040)
    sequences = [Sequence(position, shared=512) for position in positions[:4]]
    sequences += [Sequence(position, shared=768, family=1) for position in positions[4:]]
    case = shared_case(tuple(sequences), 16, 4, block_size, window=window, seed=window)
    assert bool(spared_keys(case)) == (window > 256)
    for threads in THREADS:
        attend(case, isa, threads)


def random_sequences(random: np.random.Generator, block_size: int) -> list[Sequence]:
    """2 … 40 sequences of up to 3 families, most of one row; prefixes and lengths near the edges of splits."""
    prefixes = random.integers(2, 34, 3) * 16 // block_size * block_size
    sequences = []
    for _ in range(random.integers(2, 41)):
        family = int(random.integers(0, 3))
        edge = int(random.choice([256, 512, prefixes[family]]))
        first = max(0, edge + int(random.integers(-3, 4)) + int(random.choice([0, 0, 7, 100])))
        rows = int(random.choice([1, 1, 1, 1, 2, 5, 9, 20]))
        shared = min(int(prefixes[family]), (first + rows) // block_size * block_size)
        sequences.append(Sequence(first, rows, family, shared))
    return sequences


@every_isa
@pytest.mark.parametrize("seed", range(16))
def test_random_crowds(seed, isa):
    random = np.random.default_rng(seed)
    block_size = int(random.choice([16, 32, 64]))
    case = shared_case(
        tuple(random_sequences(random, block_size)),
        head_dim=int(random.choice([16, 32, 80])),
        group=int(random.choice([1, 3, 4])),
        block_size=block_size,
        num_kv_heads=int(random.choice([1, 2])),
        window=None if seed % 3 else int(random.choice([260, 400, 512])),
        seed=seed,
        dtype="int8" if seed % 2 else "bf16",
    )
    attend(case, isa, THREADS[seed % 3])
