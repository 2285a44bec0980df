"""A row's bits depend on its own history alone: not on company, chunks, pages or what free pages hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.kernels.reference import ReferenceBackend

LONG, SHORT = 290, 70  # over a split of 256; over a key block of 64
IDS = np.random.default_rng(9).integers(0, tiny_llama.VOCABULARY, (3, LONG))
MODEL = tiny_llama.TinyLlama()


def backend(block_size, num_blocks=64, dtype="bf16"):
    """A cache whose every page is poisoned."""
    made = ReferenceBackend(replace(tiny_llama.kv_shape(num_blocks, block_size), dtype=dtype))
    for block in range(num_blocks):
        made.fill(block, 0xFF)
    return made


def logits(parts, block_size=16, chunks=(LONG,), seed=None, dtype="bf16"):
    """Logits per sequence of (ids), all run side by side, each step taking the next chunk size."""
    made = backend(block_size, dtype=dtype)
    forward = MODEL.build(made)
    numbers = np.arange(64) if seed is None else np.random.default_rng(seed).permutation(64)
    per_sequence = -(-LONG // block_size)
    tables = [numbers[i * per_sequence : (i + 1) * per_sequence] for i in range(len(parts))]
    done = [0] * len(parts)
    results = [[] for _ in parts]
    turn = 0
    while any(count < len(ids) for count, ids in zip(done, parts)):
        rows, taken = [], []
        for index, ids in enumerate(parts):
            size = min(chunks[turn % len(chunks)], len(ids) - done[index])
            turn += 1
            if size:
                rows.append((ids[done[index] : done[index] + size], done[index], tables[index]))
                taken.append((index, size))
        output = iter(made.run(tiny_llama.step(rows), forward))
        for index, size in taken:
            results[index] += [next(output) for _ in range(size)]
            done[index] += size
    return [np.array(result) for result in results]


@pytest.fixture(scope="module")
def alone():
    return [logits([ids])[0] for ids in IDS]


def assert_same(actual, expected):
    assert np.isfinite(expected).all()
    assert np.array_equal(actual.view(np.uint32), expected[: len(actual)].view(np.uint32))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_size_and_block_tables(alone, block_size):
    assert_same(logits([IDS[0]], block_size, seed=block_size)[0], alone[0])


@pytest.mark.parametrize("chunks", [(64,), (63, 2), (256,), (100, 1, 1, 188)])
def test_chunks_of_a_long_sequence(alone, chunks):
    assert_same(logits([IDS[1]], chunks=chunks)[0], alone[1])


def test_int8_kv_in_other_chunks_blocks_and_company(alone):
    expected = logits([IDS[0]], dtype="int8")[0]
    assert not np.array_equal(expected, alone[0])
    other = logits([IDS[1][:SHORT], IDS[0]], 32, (100, 1, 63, 188), seed=3, dtype="int8")
    assert_same(other[1], expected)


@given(
    chunks=st.lists(st.integers(1, SHORT), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, SHORT), min_size=1, max_size=3),
    block_size=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=8, deadline=None)
def test_company_chunks_and_pages(alone, chunks, lengths, block_size, seed):
    parts = [ids[:length] for ids, length in zip(IDS, lengths)]
    for actual, expected in zip(logits(parts, block_size, chunks, seed), alone):
        assert_same(actual, expected)


def test_broken_row_leaves_neighbours_and_earlier_rows_alone(alone):
    """A NaN embedding poisons its own row and later ones of its sequence, nothing else, in any chunking."""
    broken = tiny_llama.TinyLlama()
    table = broken.tensors["embed"].data.copy()
    bad = tiny_llama.VOCABULARY - 1
    good = IDS[:2, :40].copy()
    good[good == bad] = 0
    table[bad] = 0xFF
    tensor = broken.tensors["embed"]
    broken.tensors["embed"] = type(tensor)(tensor.name, tensor.type, tensor.shape, table)
    sick = good[0].copy()
    sick[20] = bad
    tables = np.arange(8).reshape(2, 4)

    def run(rows):
        made = backend(16, 8)
        return made.run(tiny_llama.step(rows), broken.build(made))

    healthy = run([(good[0], 0, tables[0]), (good[1], 0, tables[1])])[:, :bad]
    mixed = run([(sick, 0, tables[0]), (good[1], 0, tables[1])])[:, :bad]
    assert np.isnan(mixed[20:40]).all()
    assert_same(mixed[:20], healthy)
    assert_same(mixed[40:], healthy[40:])
