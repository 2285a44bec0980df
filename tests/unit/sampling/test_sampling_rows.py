"""What SamplingState writes into a row is what the request asked for, step by step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from native_sampler import ISAS
from numpy.typing import NDArray

from poise.core.output import EngineSampling, TokenLogprobs
from poise.core.sampling_params import SamplingParams
from poise.kernels.cpu import _native as native
from poise.sampling import reference
from poise.sampling.rows import (
    NOT_FINITE,
    RESULT_TYPE,
    Records,
    SamplingRows,
    SamplingState,
    fill_target,
    outcomes,
    token_logprobs,
)

VOCAB = 100
PROMPT = [5, 9, 9, 40]
LOGITS = (np.random.default_rng(0).standard_normal((1, VOCAB)) * 3).astype(np.float32)


def state_of(
    stop: frozenset[int] = frozenset(),
    bad_words: tuple[tuple[int, ...], ...] = (),
    seed: int = 3,
    choice: int = 0,
    **params: Any,
) -> SamplingState:
    sampling = EngineSampling(SamplingParams(**params), seed, choice, stop, bad_words)
    return SamplingState(sampling, VOCAB, len(PROMPT))


def history_of(*output: int) -> NDArray[np.int32]:
    history = np.full(64, -7, np.int32)  # what lies past the known tokens is never read
    history[: len(PROMPT) + len(output)] = [*PROMPT, *output]
    return history


def token_ids(results: Records) -> list[int]:
    return [token for _, token in outcomes(results.view(np.uint8).data)]


def run(rows: SamplingRows, logits: NDArray[np.float32] = LOGITS) -> Records:
    data = native.sample_rows(logits, rows.records.view(np.uint8), ISAS[-1])
    return np.frombuffer(data, RESULT_TYPE)


def draw(state: SamplingState, *output: int, logits: NDArray[np.float32] = LOGITS) -> int:
    rows = SamplingRows(1)
    state.fill(rows, 0, history_of(*output), len(PROMPT) + len(output))
    return token_ids(run(rows, logits))[0]


def peaked(*best_first: int) -> NDArray[np.float32]:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, list(best_first)] = np.arange(len(best_first), 0, -1)
    return logits


def expected(**row: Any) -> int:
    return reference.sample_row(LOGITS[0], reference.Row(**row)).token_id


def test_a_row_carries_every_parameter() -> None:
    output = [7, 7, 8]
    params = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.2,
    }
    for choice, seed in ((0, 1), (1, 2**64 - 1), (2, 2**40)):
        for allowed in (None, tuple(range(0, VOCAB, 3))):
            state = state_of(
                seed=seed,
                choice=choice,
                logit_bias={6: 1.5, 99: -2.0},
                allowed_token_ids=allowed,
                **params,
            )
            assert draw(state, *output) == expected(
                seed=seed,
                choice=choice,
                position=len(PROMPT) + 3,
                prompt=PROMPT,
                output=output,
                bias={6: 1.5, 99: -2.0},
                allowed=allowed,
                **params,
            )


def test_the_position_moves_with_the_known_tokens() -> None:
    state = state_of()
    drawn = [draw(state, *range(length)) for length in range(30)]
    assert drawn == [expected(seed=3, position=len(PROMPT) + length) for length in range(30)]


def test_penalties_follow_the_history_as_it_grows_and_moves() -> None:
    state = state_of(temperature=0.0, frequency_penalty=2.0)
    logits = peaked(1, 2, 3)
    history = history_of()
    rows = SamplingRows(1)
    drawn = []
    for known in range(len(PROMPT), len(PROMPT) + 4):
        if known == len(PROMPT) + 2:
            history = history.copy()
        state.fill(rows, 0, history, known)
        drawn += token_ids(run(rows, logits))
        history[known] = drawn[-1]
    assert drawn == [1, 2, 1, 3]


def test_a_tiny_temperature_is_greedy_as_the_parameters_say() -> None:
    assert draw(state_of(temperature=9.9999998e-6, seed=8), logits=peaked(30)) == 30


def test_min_tokens_bans_the_stop_ids_until_it_is_met() -> None:
    state = state_of(stop=frozenset({1, 2}), temperature=0.0, min_tokens=2)
    drawn = [draw(state, *[50] * length, logits=peaked(1, 2, 3)) for length in range(4)]
    assert drawn == [3, 3, 1, 1]


def test_stop_ids_alone_ban_nothing() -> None:
    assert draw(state_of(stop=frozenset({1}), temperature=0.0), logits=peaked(1)) == 1


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    state = state_of(bad_words=((1,), (2,)), temperature=0.0)
    assert draw(state, logits=peaked(1, 2, 3)) == 3


@pytest.mark.parametrize(
    ("output", "token"),
    [([], 2), ([60], 2), ([60, 61], 1), ([61, 60], 2), ([60, 61, 62], 2), ([9, 60, 61], 1)],
)
def test_a_bad_word_is_banned_at_its_last_token(output: list[int], token: int) -> None:
    state = state_of(bad_words=((60, 61, 2),), temperature=0.0)
    assert draw(state, *output, logits=peaked(2, 1)) == token


def test_a_bad_word_may_begin_in_the_prompt_but_not_before_it() -> None:
    begins = state_of(bad_words=((9, 40, 2),), temperature=0.0)
    assert draw(begins, logits=peaked(2, 1)) == 1
    longer_than_all = state_of(bad_words=((0, *PROMPT, 2),), temperature=0.0)
    assert draw(longer_than_all, logits=peaked(2, 1)) == 2


def test_bans_of_several_kinds_add_up_and_end() -> None:
    state = state_of(stop=frozenset({1}), bad_words=((2,), (50, 3)), temperature=0.0, min_tokens=2)
    logits = peaked(1, 2, 3, 4)
    assert [draw(state, *output, logits=logits) for output in ([], [50], [50, 7], [7, 50])] == [
        *(3, 4, 1, 1)
    ]


def test_logprobs_are_reported_where_asked_for() -> None:
    rows = SamplingRows(3)
    states = [state_of(temperature=0.0, logprobs=count) for count in (None, 0, 2)]
    for index, state in enumerate(states):
        state.fill(rows, index, history_of(), len(PROMPT))
    results = run(rows, np.repeat(peaked(10, 20), 3, axis=0))
    assert token_ids(results) == [10, 10, 10]
    assert results["rank"].tolist() == [0, 1, 1]
    total = math.log(VOCAB - 2 + math.e + math.e**2)
    own = token_logprobs(results, 1)
    assert own == TokenLogprobs(10, pytest.approx(2 - total, abs=1e-6), 1)
    full = token_logprobs(results, 2)
    assert full.top == (
        (10, own.logprob),
        (20, pytest.approx(1 - total, abs=1e-6)),
    )
    assert type(full.token_id) is type(full.rank) is int
    assert type(full.logprob) is type(full.top[0][1]) is float


def test_target_rows_score_tokens_of_the_prompt() -> None:
    rows = SamplingRows(4)
    state = state_of(temperature=0.0, logit_bias={4: 100.0})
    for index in range(4):
        state.fill(rows, index, history_of(), len(PROMPT))
    fill_target(rows, 1, 20, 1)
    fill_target(rows, 2, 99, 1)
    results = run(rows, np.repeat(peaked(10, 20), 4, axis=0))
    first, last = token_logprobs(results, 1), token_logprobs(results, 2)
    assert (first.token_id, first.rank, [token for token, _ in first.top]) == (20, 2, [10])
    assert (last.token_id, last.rank, [token for token, _ in last.top]) == (99, 3, [10])
    assert last.logprob < first.logprob < last.top[0][1]
    assert token_ids(results) == [4, 20, 99, 4]


def test_a_row_overwrites_what_was_there() -> None:
    rows = SamplingRows(1)
    state_of(temperature=0.0, logit_bias={4: 100.0}, logprobs=3).fill(
        rows, 0, history_of(), len(PROMPT)
    )
    state_of(temperature=0.0).fill(rows, 0, history_of(), len(PROMPT))
    results = run(rows, peaked(8))
    assert token_ids(results) == [8]
    assert results["num_top"][0] == 0


def test_broken_rows_draw_nothing() -> None:
    rows = SamplingRows(1)
    state_of().fill(rows, 0, history_of(), len(PROMPT))
    results = run(rows, np.full((1, VOCAB), np.nan, np.float32))
    assert token_ids(results) == [-1]
    assert results["status"].tolist() == [NOT_FINITE]


def test_a_history_of_the_wrong_type_is_refused() -> None:
    state = state_of(presence_penalty=1.0)
    with pytest.raises(TypeError, match="int64"):
        state.fill(SamplingRows(1), 0, np.zeros(9, np.int64), 4)  # type: ignore[arg-type]
