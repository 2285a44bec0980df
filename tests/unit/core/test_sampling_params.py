"""Sampling parameters are checked when they are made: every wrong value is an InvalidRequestError that names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from poise.core.sampling_params import SamplingParams
from poise.errors import InvalidRequestError

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, 10**400, "1", True, None])
def test_numbers(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs"])
@pytest.mark.parametrize("value", [2**70, -(2**70), 1.5, "1", True])
def test_integers(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("token", [-1, 2**31, 1.0, "1"])
def test_token_ids(token: Any) -> None:
    for changes in ({"stop_token_ids": [token]}, {"allowed_token_ids": [token]}):
        with pytest.raises(InvalidRequestError):
            SamplingParams(**changes)
    with pytest.raises(InvalidRequestError):
        SamplingParams(logit_bias={token: 1.0})


def test_vocabulary() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    with pytest.raises(InvalidRequestError, match="token id 10"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)


def test_stop_may_be_one_string() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
