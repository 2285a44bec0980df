"""The figures of quality on distributions small enough to check by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from poise.verify.quality_statistics import compare, summarise


def logits(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows)).astype(np.float32)


def test_divergence_loss_and_agreement_of_one_token() -> None:
    reference, measured = logits([0.5, 0.3, 0.2]), logits([0.2, 0.3, 0.5])
    scores = compare(reference + 7, measured - 3, np.array([1], np.int32))  # shifts mean nothing
    expected = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    assert scores.divergence[0] == pytest.approx(expected, abs=1e-6)
    assert scores.reference_loss[0] == pytest.approx(-math.log(0.3), abs=1e-6)
    assert scores.loss[0] == pytest.approx(-math.log(0.3), abs=1e-6)
    assert not scores.agrees[0]


def test_a_text_joins_its_tiles() -> None:
    even, sure = logits([0.5, 0.5], [0.5, 0.5]), logits([0.75, 0.25])
    first = compare(even, even, np.array([0, 1], np.int32))
    second = compare(sure, logits([0.25, 0.75]), np.array([0], np.int32))
    summary = summarise([first, second])
    assert summary.num_tokens == 3
    assert summary.kl.value == pytest.approx(0.5 * math.log(3) / 3, rel=1e-5)
    assert summary.top1_agreement.value == pytest.approx(2 / 3)
    assert summary.top1_agreement.error == pytest.approx(math.sqrt(2 / 9 / 3))
    losses = [math.log(2), math.log(2), -math.log(0.25)]
    assert summary.perplexity.value == pytest.approx(math.exp(sum(losses) / 3), rel=1e-6)
    ratio = summary.perplexity.value / summary.reference_perplexity.value
    assert summary.perplexity_change.value == pytest.approx(ratio - 1, rel=1e-6)
    assert summary.kl_p99 <= 0.5 * math.log(3) + 1e-6


rows = arrays.arrays(np.float32, (3, 17), elements=st.floats(-80, 80, width=32))


@given(reference=rows, measured=rows)
def test_divergence_is_never_negative_and_zero_between_equals(
    reference: np.ndarray, measured: np.ndarray
) -> None:
    tokens = np.zeros(3, np.int32)
    assert (compare(reference, measured, tokens).divergence >= -1e-9).all()
    same = compare(reference, reference, tokens)
    assert (same.divergence == 0).all()
    assert same.agrees.all()
