"""A row's logits have the same bits in any company, order, chunk, block size, thread count and variant: whole models."""

from __future__ import annotations

import numpy as np
import pytest
from native_models import (
    MAX_TOKENS,
    NUM_BLOCKS,
    NUMERICS,
    Part,
    Reference,
    backend_of,
    load,
    native_logits,
    poison,
    tiny_gguf,
)

from poise.kernels.cpu import available_isas

ISAS = available_isas()
LENGTH = 150
every_architecture = pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
every_numerics = pytest.mark.parametrize("numerics", NUMERICS, ids=lambda n: "-".join(n.values()))
every_isa = pytest.mark.parametrize("isa", ISAS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def random_ids(count, seed=0):
    return np.random.default_rng(seed).integers(3, 288, count)


def assert_same(actual, expected, note):
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32)), note


@every_numerics
@every_isa
@every_architecture
def test_native_equals_the_reference(architecture, isa, numerics, folder, monkeypatch):
    path = tiny_gguf(folder, architecture)
    parts = [Part(random_ids(70), 0, np.arange(5)), Part(random_ids(9, 1), 0, np.array([7]))]
    expected = Reference(path, "exact", **numerics).logits(parts)
    assert np.isfinite(expected).all()
    for threads in (1, 2, 3):
        actual = native_logits(load(path, monkeypatch, isa, threads, **numerics), parts)
        assert_same(actual, expected, f"{threads} threads")


@every_numerics
@every_architecture
def test_chunks_blocks_threads_and_variants(architecture, numerics, folder, monkeypatch):
    path = tiny_gguf(folder, architecture)
    ids = random_ids(LENGTH)
    expected = None
    for isa in ISAS:
        for threads, block_size in ((1, 16), (2, 32), (3, 64)):
            loaded = load(path, monkeypatch, isa, threads, block_size, **numerics)
            per_group = loaded.num_blocks // len(loaded.kv_groups)
            blocks = np.random.default_rng(2).permutation(per_group)
            blocks = blocks[: -(-LENGTH // block_size)]
            few = isa == "baseline" and numerics is not NUMERICS[0]  # slow
            for chunk in (LENGTH, 17) if few else (LENGTH, 1, 15, 16, 17, 63, 64, 65):
                poison(loaded)
                rows = [
                    native_logits(loaded, [Part(ids[first : first + chunk], first, blocks)])
                    for first in range(0, LENGTH, chunk)
                ]
                actual = np.concatenate(rows)
                expected = actual if expected is None else expected
                note = f"{isa}, {threads} threads, blocks of {block_size}, chunks of {chunk}"
                assert_same(actual, expected, note)


@every_numerics
@every_isa
@every_architecture
def test_company_and_order(architecture, isa, numerics, folder, monkeypatch):
    """1 … 40 sequences of which some go on and some begin, in any order, recycled pages between steps."""
    loaded = load(tiny_gguf(folder, architecture), monkeypatch, isa, threads=2, **numerics)
    random = np.random.default_rng(4)
    sequences = []
    for index in range(40):
        known, rows = (int(random.integers(0, 40)), int(random.integers(1, 12)))
        sequences.append((random_ids(known + rows, 100 + index), known))
    alone = []
    for ids, known in sequences:
        native_logits(loaded, [Part(ids, 0, np.arange(4))])
        alone.append(native_logits(loaded, [Part(ids[known:], known, np.arange(4))]))
    companies = (1, 2, 3, 5, 8, 17, 33, 40) if isa == "baseline" else range(1, 41)
    for company in companies if numerics is NUMERICS[0] else companies[2::5]:
        poison(loaded)
        chosen = random.permutation(40)[:company]
        blocks = random.permutation(NUM_BLOCKS)[: 4 * company].reshape(company, 4)
        first = [Part(sequences[s][0], 0, b) for s, b in zip(chosen, blocks)]
        for part in first:  # some KV of each is there, written in other company
            native_logits(loaded, [part])
        parts = [
            Part(sequences[s][0][sequences[s][1] :], sequences[s][1], b)
            for s, b in zip(chosen, blocks)
        ]
        assert sum(len(part.token_ids) for part in parts) <= MAX_TOKENS
        expected = np.concatenate([alone[s] for s in chosen])
        assert_same(native_logits(loaded, parts), expected, f"company of {company}")


@every_isa
@every_architecture
def test_a_prefix_on_shared_blocks(architecture, isa, folder, monkeypatch):
    """Sequences on the blocks of one prefix, read once for all of them: the bits of each one's own copy."""
    loaded = load(tiny_gguf(folder, architecture), monkeypatch, isa, threads=2)
    length, tails = 272, [random_ids(1 + index % 3, index) for index in range(6)]
    prefix, blocks = random_ids(length, 9), np.arange(-(-length // 16))
    alone = []
    for tail in tails:
        whole = native_logits(loaded, [Part(np.concatenate([prefix, tail]), 0, np.arange(18))])
        alone.append(whole[length:])
    poison(loaded)
    native_logits(loaded, [Part(prefix, 0, blocks)])
    parts = [
        Part(tail, length, np.append(blocks, len(blocks) + index))
        for index, tail in enumerate(tails)
    ]
    for on in (True, False):
        backend_of(loaded).plan.share_prefixes = on
        assert_same(native_logits(loaded, parts), np.concatenate(alone), f"pass {on}")
        assert max(backend_of(loaded).spared_keys) == (5 * 256 if on else 0)


@every_isa
@every_architecture
def test_only_rows_that_are_asked_for(architecture, isa, folder, monkeypatch):
    """Any choice of rows, in any order and twice, gives the bits that these rows have where all are asked for; KV is written
    for all of them."""
    path, prefix = tiny_gguf(folder, architecture), random_ids(272, 9)
    shared = np.arange(17)
    parts = [
        Part(random_ids(150), 0, np.arange(20, 30)),
        *(
            Part(random_ids(1 + index, index), 272, np.append(shared, 40 + index))
            for index in range(6)
        ),
        Part(random_ids(70, 7), 0, np.arange(30, 35)),
    ]
    count = sum(len(part.token_ids) for part in parts)
    ends = np.cumsum([len(part.token_ids) for part in parts]) - 1
    random = np.random.default_rng(5)
    choices = [
        np.array([], int),
        ends,
        ends[:1],
        np.arange(count - 1),
        random.permutation(count)[:40],
        random.integers(0, count, 90),
    ]
    loaded = load(path, monkeypatch, isa, threads=1)
    native_logits(loaded, [Part(prefix, 0, shared)])
    every = native_logits(loaded, parts)
    following = [Part(random_ids(1, 11), 150, np.arange(20, 30))]
    after = native_logits(loaded, following)
    for threads in (1, 2, 3):
        loaded = load(path, monkeypatch, isa, threads)
        native_logits(loaded, [Part(prefix, 0, shared)], np.array([], int))
        for wanted in choices:
            actual = native_logits(loaded, parts, wanted)
            assert_same(actual, every[wanted], f"{threads} threads, rows {wanted}")
            assert_same(native_logits(loaded, following), after, "the step behind it")
