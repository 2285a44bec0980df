"""How far the logits of one arithmetic are from those of another, token by token and over a text.

Knows arrays, no model. Sums run in float64. A standard error takes the scored tokens as independent, as llama.cpp's does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What each scored token says; all of shape [tokens]."""

    divergence: F64  # KL(reference ‖ measured) of the next-token distributions, in nats
    reference_loss: F64  # −log p of the text's own next token
    loss: F64
    agrees: NDArray[np.bool_]  # the same most likely token


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A text's figures. `perplexity_change` is measured / reference − 1, from the paired losses."""

    num_tokens: int
    kl: Estimate
    kl_p99: float
    perplexity: Estimate
    reference_perplexity: Estimate
    perplexity_change: Estimate
    top1_agreement: Estimate


def compare(reference: F32, measured: F32, next_tokens: NDArray[np.int32]) -> TokenScores:
    """Scores of rows of logits [rows, vocabulary] whose text goes on with `next_tokens` [rows]."""
    expected, probabilities = _log_softmax(reference)
    found, _ = _log_softmax(measured)
    rows = np.arange(len(next_tokens))
    return TokenScores(
        divergence=np.einsum("rv,rv->r", probabilities, expected - found),
        reference_loss=-expected[rows, next_tokens],
        loss=-found[rows, next_tokens],
        agrees=reference.argmax(axis=1) == measured.argmax(axis=1),
    )


def summarise(parts: Sequence[TokenScores]) -> Summary:
    """Joins the scores of a text's tiles. The error of a perplexity is that of its logarithm, scaled (delta method)."""
    divergence = np.concatenate([part.divergence for part in parts])
    reference_loss = np.concatenate([part.reference_loss for part in parts])
    loss = np.concatenate([part.loss for part in parts])
    agreement = _mean(np.concatenate([part.agrees for part in parts]).astype(np.float64))
    change = _exponential(_mean(loss - reference_loss))
    return Summary(
        num_tokens=len(loss),
        kl=_mean(divergence),
        kl_p99=float(np.quantile(divergence, 0.99)),
        perplexity=_exponential(_mean(loss)),
        reference_perplexity=_exponential(_mean(reference_loss)),
        perplexity_change=Estimate(change.value - 1, change.error),
        top1_agreement=agreement,
    )


def _log_softmax(logits: F32) -> tuple[F64, F64]:
    """Logarithms of the probabilities, and the probabilities."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    probabilities = np.exp(shifted)
    total = probabilities.sum(axis=1, keepdims=True)
    probabilities /= total
    shifted -= np.log(total)
    return shifted, probabilities


def _mean(values: F64) -> Estimate:
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)))


def _exponential(estimate: Estimate) -> Estimate:
    value = math.exp(estimate.value)
    return Estimate(value, value * estimate.error)
