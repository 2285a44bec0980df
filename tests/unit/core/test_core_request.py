"""The rule that ends a request, and the clocks."""

from __future__ import annotations

import pytest
from core_harness import sampling

from poise.core.clock import ManualClock, MonotonicClock
from poise.core.request import Request, finish_rule


def request_with(output: list[int], max_tokens: int = 10, **params: object) -> Request:
    request = Request.create(0, [7, 7, 7], sampling(**params), max_tokens, 0.0)
    request.token_ids += output
    return request


@pytest.mark.parametrize(
    ("output", "params", "max_model_len", "expected"),
    [
        ([1], {}, 100, (None, None)),
        ([1, 9], {"stop_token_ids": [9]}, 100, ("stop", 9)),
        ([9], {"stop_token_ids": [9], "min_tokens": 2}, 100, (None, None)),
        ([9, 9], {"stop_token_ids": [9], "min_tokens": 2}, 100, ("stop", 9)),
        ([1] * 10, {}, 100, ("length", None)),
        ([1] * 9 + [9], {"stop_token_ids": [9]}, 100, ("stop", 9)),
        ([1, 2], {}, 6, (None, None)),
        ([1, 2, 3], {}, 6, ("length", None)),
    ],
)
def test_finish_rule(
    output: list[int],
    params: dict[str, object],
    max_model_len: int,
    expected: tuple[str | None, int | None],
) -> None:
    assert finish_rule(request_with(output, **params), max_model_len) == expected


def test_the_models_own_end_token_has_no_stop_reason() -> None:
    request = request_with([])
    object.__setattr__(request.sampling, "stop_token_ids", frozenset([5]))
    assert request.append_output(5, 100)
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    assert request.output_token_ids == [5]  # the stop token is output too


def test_prompt_logprobs_are_needed_until_the_last_prompt_position_is_reported() -> None:
    request = request_with([], prompt_logprobs=1)
    assert request.needs_prompt_logprobs
    request.num_prompt_logprobs = 2
    assert not request.needs_prompt_logprobs
    assert not request_with([]).needs_prompt_logprobs


def test_clocks_never_go_back() -> None:
    clock = ManualClock(5.0)
    clock.advance(1.5)
    assert clock.now() == 6.5
    with pytest.raises(AssertionError, match="go back"):
        clock.advance(-1.0)
    monotonic = MonotonicClock()
    assert monotonic.now() <= monotonic.now()
