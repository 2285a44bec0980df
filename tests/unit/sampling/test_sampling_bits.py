"""Every native variant draws and scores with the reference's bits, over random and hostile rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from native_sampler import ISAS, assert_same, bits, run_rows
from numpy.typing import NDArray

from poise.kernels import reference_math
from poise.kernels.cpu import _native as native
from poise.sampling.reference import Row, exponential, filter_tokens, philox, sample_row

Logits = NDArray[np.float32]
INF = np.float32(np.inf)
WORD = 2**32 - 1
FULL_VOCAB = 49_152


def gaussian(rng: np.random.Generator, vocab: int) -> Logits:
    return (rng.standard_normal(vocab) * 4).astype(np.float32)


def with_ties(rng: np.random.Generator, vocab: int) -> Logits:
    return np.round(rng.standard_normal(vocab) * 2).astype(np.float32)


def half_excluded(rng: np.random.Generator, vocab: int) -> Logits:
    return np.where(rng.random(vocab) < 0.5, -INF, gaussian(rng, vocab))


def huge(rng: np.random.Generator, vocab: int) -> Logits:
    return rng.uniform(-3.4e38, 3.4e38, vocab).astype(np.float32)


def all_equal(rng: np.random.Generator, vocab: int) -> Logits:
    return np.full(vocab, rng.standard_normal(), np.float32)


def denormal(rng: np.random.Generator, vocab: int) -> Logits:
    return (rng.standard_normal(vocab) * 1e-38).astype(np.float32)


def signed_zeros(rng: np.random.Generator, vocab: int) -> Logits:
    return np.where(rng.random(vocab) < 0.5, np.float32(-0.0), np.float32(0))


def any_scale(rng: np.random.Generator, vocab: int) -> Logits:
    return (rng.standard_normal(vocab) * 10.0 ** rng.integers(-6, 7)).astype(np.float32)


def ascending(rng: np.random.Generator, vocab: int) -> Logits:
    return np.sort(gaussian(rng, vocab))


def one_bad(rng: np.random.Generator, vocab: int) -> Logits:
    z = gaussian(rng, vocab)
    z[rng.integers(vocab)] = rng.choice(np.array([np.nan, -np.nan, np.inf], np.float32))
    return z


FAMILIES = [
    *(gaussian, with_ties, half_excluded, huge, all_equal, denormal),
    *(signed_zeros, any_scale, ascending, one_bad),
]


def random_row(rng: np.random.Generator, vocab: int) -> Row:
    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    def ids(count: int) -> list[int]:
        return rng.integers(0, vocab, count).tolist()

    row = Row(
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        position=int(rng.integers(2**32)),
        choice=int(rng.integers(4)),
        temperature=pick(0.0, 1.0, 1.0, 0.7, 0.01, 100.0, 1e-5, 1.3),
        top_p=pick(1.0, 1.0, 0.9, 0.5, 1e-6, 0.999, 0.9999999, 0.1, 1e-30),
        top_k=pick(0, 0, 1, 2, 5, 50, vocab, vocab + 5, max(1, vocab - 1)),
        min_p=pick(0.0, 0.0, 0.1, 1.0, 1e-9, 0.5, 1e-40),
        num_logprobs=int(rng.integers(-1, 21)),
    )
    if rng.random() < 0.3:
        row = replace(
            row,
            repetition_penalty=pick(1.0, 1.2, 0.5, 1000.0),
            frequency_penalty=pick(0.0, 0.5, -2.0),
            presence_penalty=pick(0.0, 1.0, -0.3),
            prompt=ids(rng.integers(0, 20)),
            output=ids(rng.integers(0, 20)),
        )
    if rng.random() < 0.2:
        row = replace(row, bias={token: float(rng.uniform(-100, 100)) for token in ids(3)})
    if rng.random() < 0.2:
        row = replace(row, allowed=ids(rng.integers(1, 1 + min(vocab, 30))))
    if rng.random() < 0.2:
        row = replace(row, banned=ids(rng.integers(1, 4)))
    if rng.random() < 0.1:
        row = replace(row, target=int(rng.integers(vocab)), num_logprobs=int(rng.integers(0, 21)))
    if rng.random() < 0.3:
        q = rng.random(vocab).astype(np.float32) ** 4 if rng.random() < 0.5 else None
        row = replace(
            row,
            draft=int(rng.integers(vocab + 2)),
            draft_probabilities=None if q is None else q / q.sum(dtype=np.float32),
        )
    return row


@pytest.mark.parametrize("family", FAMILIES)
def test_every_small_vocabulary(family: Any) -> None:
    number = FAMILIES.index(family)
    rng = np.random.default_rng(number)
    for vocab in range(1 + number % 3, 71, 3):
        assert_same(family(rng, vocab)[np.newaxis], [random_row(rng, vocab)])


@pytest.mark.parametrize("family", FAMILIES)
def test_vocabularies_past_a_cut_and_off_the_grid(family: Any) -> None:
    rng = np.random.default_rng(100 + FAMILIES.index(family))
    for vocab in (4095, 4097, 4999):
        logits = np.stack([family(rng, vocab) for _ in range(2)])
        assert_same(logits, [random_row(rng, vocab) for _ in range(2)])


@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=0, num_logprobs=20),
        Row(seed=1),
        Row(seed=2, temperature=0.7, top_p=0.95),
        Row(seed=3, temperature=1.5, top_p=0.999),
        Row(seed=4, top_k=50, top_p=0.9),
        Row(seed=5, top_k=2000),
        Row(seed=6, min_p=0.05, num_logprobs=0),
    ],
)
def test_a_full_vocabulary(row: Row) -> None:
    logits = gaussian(np.random.default_rng(7), FULL_VOCAB)
    assert_same(logits[np.newaxis], [row])


def test_a_flat_full_vocabulary_keeps_most_tokens() -> None:
    logits = np.zeros(FULL_VOCAB, np.float32)
    assert_same(logits[np.newaxis], [Row(seed=9, top_p=0.9)])
    assert filter_tokens(logits, Row(top_p=0.9)).sum() == -(-FULL_VOCAB * 9 // 10)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 15, 16, 39])
def test_a_nan_or_infinity_anywhere_breaks_the_row_only(bad: float, at: int) -> None:
    rng = np.random.default_rng(3)
    logits = np.stack([gaussian(rng, 40) for _ in range(3)])
    logits[1, at] = bad
    rows = [Row(seed=i, banned=[at], num_logprobs=3) for i in range(3)]
    results = assert_same(logits, rows)
    assert [result.status for result in results] == [0, 1, 0]
    assert results[1].token_id == -1


def test_no_candidate_is_told_apart_from_broken_logits() -> None:
    logits = np.zeros((4, 33), np.float32)
    logits[3] = -INF
    rows = [
        Row(allowed=[32], banned=[32]),
        Row(temperature=0, allowed=[5], banned=[5]),
        Row(allowed=[32]),
        Row(target=3, num_logprobs=0),
    ]
    results = assert_same(logits, rows)
    assert [result.status for result in results] == [2, 2, 0, 2]
    assert results[2].token_id == 32


def test_ties_go_to_the_lower_id() -> None:
    logits = np.zeros((1, 50), np.float32)
    logits[0, [20, 30, 40]] = 1
    (result,) = assert_same(logits, [Row(temperature=0, num_logprobs=4)])
    assert result.token_id == 20
    assert [token for token, _ in result.top] == [20, 30, 40, 0]
    assert result.rank == 1
    (last,) = assert_same(logits, [Row(target=40, num_logprobs=0)])
    assert last.rank == 1


def test_negative_zero_is_not_below_zero() -> None:
    logits = np.array([[-1, -0.0, 0.0, -0.0]], np.float32)
    assert assert_same(logits, [Row(temperature=0)])[0].token_id == 1


def test_min_p_keeps_a_logit_at_the_threshold_and_not_below() -> None:
    threshold = reference_math.log(np.float32(0.1))
    below = np.nextafter(threshold, -INF)
    logits = np.array([0, threshold, below, threshold], np.float32)
    assert filter_tokens(logits, Row(min_p=0.1)).tolist() == [True, True, False, True]
    requests = [Row(seed=seed, min_p=0.1) for seed in range(60)]
    drawn = {result.token_id for result in assert_same(np.tile(logits, (60, 1)), requests)}
    assert drawn == {0, 1, 3}


def test_top_k_cuts_among_equals_by_id() -> None:
    logits = np.array([1, 2, 1, 1, 2, 1], np.float32)
    kept = filter_tokens(logits, Row(top_k=4))
    assert np.flatnonzero(kept).tolist() == [0, 1, 2, 4]
    requests = [Row(seed=seed, top_k=4, temperature=100) for seed in range(60)]
    drawn = {result.token_id for result in assert_same(np.tile(logits, (60, 1)), requests)}
    assert drawn == {0, 1, 2, 4}


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    for top_p, count in ((1e-6, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.75, 3), (0.95, 4)):
        assert filter_tokens(logits, Row(top_p=top_p)).sum() == count


def test_top_p_stops_where_it_is_reached_exactly() -> None:
    logits = np.zeros(8, np.float32)
    requests = [Row(seed=seed, top_p=0.5) for seed in range(60)]
    drawn = {result.token_id for result in assert_same(np.tile(logits, (60, 1)), requests)}
    assert drawn == {0, 1, 2, 3}


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_pruning_never_loses_the_winner(spread: float) -> None:
    rng = np.random.default_rng(21)
    logits = (rng.standard_normal((200, 400)) * spread).astype(np.float32)
    assert_same(logits, [Row(seed=seed, position=seed) for seed in range(200)])


def test_a_top_k_draw_is_the_unfiltered_draw_where_that_is_kept() -> None:
    logits = np.tile(gaussian(np.random.default_rng(5), 100), (40, 1))
    free = run_rows(logits, [Row(seed=seed) for seed in range(40)], "baseline")
    cut = run_rows(logits, [Row(seed=seed, top_k=5) for seed in range(40)], "baseline")
    kept = set(np.argsort(-logits[0])[:5].tolist())
    agree = [a.token_id == b.token_id for a, b in zip(free, cut) if a.token_id in kept]
    assert len(agree) > 10
    assert all(agree)


def test_overflow_before_the_draw_wins_or_loses_but_breaks_nothing() -> None:
    logits = np.array([[3e38, 1, -3e38, 3e38]], np.float32)
    for row in (
        Row(temperature=0.1),
        Row(temperature=0.1, top_p=0.5, top_k=3, min_p=0.5),
        Row(repetition_penalty=0.01, prompt=[0, 2], top_p=0.9),
        Row(repetition_penalty=1000, prompt=[0, 2], temperature=0),
    ):
        (result,) = assert_same(logits, [row])
        assert result.status == 0
        assert result.token_id in (0, 3)


def test_penalties_count_output_and_merely_notice_the_prompt() -> None:
    logits = np.array([[2.0, 2.0, 2.0, -1.0]], np.float32)
    row = Row(
        temperature=0,
        prompt=[0, 0, 0, 3],
        output=[1, 1],
        repetition_penalty=2,
        frequency_penalty=0.25,
        presence_penalty=0.125,
    )
    assert assert_same(logits, [row])[0].token_id == 2
    assert assert_same(logits, [replace(row, banned=[2])])[0].token_id == 0  # 1.0 against 0.375


def test_rows_do_not_see_each_other() -> None:
    rng = np.random.default_rng(11)
    logits = np.stack([gaussian(rng, 300) for _ in range(24)])
    rows = [random_row(rng, 300) for _ in range(24)]
    order = rng.permutation(24)
    for isa in ISAS:
        alone = [run_rows(logits[i : i + 1], rows[i : i + 1], isa)[0] for i in range(24)]
        crowd = run_rows(logits[order], [rows[i] for i in order], isa)
        assert [bits(alone[i]) for i in order] == [bits(result) for result in crowd]


def test_the_caller_keeps_its_denormals() -> None:
    run_rows(np.zeros((1, 8), np.float32), [Row()], "baseline")
    assert np.float32(1e-40) * np.float32(0.5) != 0


def test_a_target_outside_the_vocabulary_reads_nothing() -> None:
    for isa in ISAS:
        (result,) = run_rows(np.zeros((1, 16), np.float32), [Row(target=16, num_logprobs=0)], isa)
        assert result.status == 2


# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds).
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(philox(counter, key)[0].tolist()) == words
    for isa in ISAS:
        seed = key[0] | key[1] << 32
        assert tuple(native.philox(seed, *counter, isa)[:4]) == words


@pytest.mark.parametrize("isa", ISAS)
def test_philox_lanes_are_consecutive_counters(isa: str) -> None:
    seed, begin = 0x0123456789ABCDEF, 2**32 - 7  # the block counter wraps
    blocks = np.arange(begin, begin + 16, dtype=np.uint64).astype(np.uint32)
    expected = philox((blocks, 5, 6, 7), (seed & WORD, seed >> 32)).reshape(-1)
    assert native.philox(seed, begin, 5, 6, 7, isa) == expected.tolist()


def test_exponential_variates_bear_the_pruning_of_the_native_draw() -> None:
    edge = np.arange(20_000)
    words = np.concatenate([edge, WORD - edge, np.arange(0, WORD, 131_071)]).astype(np.uint32)
    variates = exponential(words)
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    exact = -np.log1p(-np.minimum(u, np.float32(1 - 2.0**-24)).astype(np.float64))
    assert np.abs(variates / exact - 1).max() < 2e-7
    logs = reference_math.log(variates)
    assert np.abs(logs - np.log(exact)).max() < 2e-6
    assert -logs.min() < 22.9


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(ValueError, match="isa is 'sse9'"):
        native.philox(0, 0, 0, 0, 0, "sse9")
    records = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="one sampling row per row"):
        native.sample_rows(np.zeros((1, 4), np.float32), records, "baseline")


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = gaussian(np.random.default_rng(2), 200)
    row = Row(seed=4, temperature=0.5, bias={3: 50.0}, banned=[7], num_logprobs=5)
    result = sample_row(logits, row)
    assert result.token_id == 3
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert result.logprob == pytest.approx(exact[3], abs=2e-6)
    best = np.argsort(-exact)[:5].tolist()
    assert [token for token, _ in result.top] == best
    assert [value for _, value in result.top] == pytest.approx(exact[best], abs=2e-6)
