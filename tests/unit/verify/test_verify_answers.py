"""Answers as bits: what counts as a difference, and that the files which carry them lose none."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.core.output import TokenLogprobs
from poise.core.sampling_params import SamplingParams
from poise.verify.answers import (
    Answer,
    ChoiceAnswer,
    Probe,
    Token,
    first_difference,
    float_bits,
    token,
)

FIRST, SECOND = Token(5, 0xBF000000, 1, ((5, 0xBF000000), (7, 0xC0000000))), Token(6, 0xBF800000, 2)
ANSWER = Answer((ChoiceAnswer((FIRST, SECOND), "length", "ab"),), prompt=(SECOND,))


def changed(**choice: object) -> Answer:
    return replace(ANSWER, choices=(replace(ANSWER.choices[0], **choice),))


def test_the_same_is_no_difference() -> None:
    assert first_difference(ANSWER, msgspec.convert(ANSWER, Answer)) is None


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (changed(tokens=(FIRST, SECOND._replace(token_id=9))), "choice 0, output token 1"),
        (changed(tokens=(FIRST, SECOND._replace(logprob=0xBF800001))), "choice 0, output token 1"),
        (changed(tokens=(FIRST._replace(rank=3), SECOND)), "choice 0, output token 0"),
        (changed(tokens=(FIRST._replace(top=FIRST.top[:1]), SECOND)), "choice 0, output token 0"),
        (changed(tokens=(FIRST,)), "choice 0, output token 1"),
        (changed(finish_reason="stop"), "choice 0, finish reason"),
        (changed(text="ac"), "choice 0, text"),
        (replace(ANSWER, prompt=(FIRST,)), "prompt position 1"),
        (replace(ANSWER, choices=()), "number of choices"),
    ],
)
def test_every_part_counts(other: Answer, where: str) -> None:
    difference = first_difference(ANSWER, other)
    assert difference is not None
    assert difference.where == where
    assert difference.expected != difference.actual


def test_a_text_that_nobody_made_is_not_compared() -> None:
    assert first_difference(ANSWER, changed(text=None)) is None


def test_one_unit_in_the_last_place_and_the_sign_of_zero_show() -> None:
    below = float(np.nextafter(np.float32(-0.5), np.float32(-1)))
    assert float_bits(-0.5) != float_bits(below)
    assert float_bits(0.0) != float_bits(-0.0)


@given(st.floats(width=32, allow_nan=False))
def test_bits_are_those_of_float32(value: float) -> None:
    assert float_bits(value) == int(np.float32(value).view(np.uint32))
    entry = token(TokenLogprobs(3, value, 1, ((4, value),)))
    assert entry == (3, float_bits(value), 1, ((4, float_bits(value)),))


def test_a_probe_survives_json() -> None:
    params = SamplingParams(logit_bias={3: 0.1, 70: -math.pi}, stop_token_ids=[4], seed=2**64 - 1)
    probe = Probe("one", (1, 2, 3), params, 2**64 - 1)
    assert msgspec.json.decode(msgspec.json.encode(probe), type=Probe) == probe
