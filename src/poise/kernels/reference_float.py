"""The same operations in plain float32: what a textbook, or transformers, computes.

The yardstick for quality (KL, goldens), not a contract on bits: sums run in any order, nothing is rounded to bf16.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from poise.kernels.ops import Activation
from poise.kernels.reference_containers import FloatWeights, IntegerWeights
from poise.kernels.reference_math import F32, quiet


class Matrix:
    """Dequantised values [out, in]."""

    def __init__(self, weights: IntegerWeights | FloatWeights) -> None:
        self.values = weights.dequantise()

    @quiet
    def product(self, a: F32) -> F32:
        result: F32 = np.matmul(a, self.values.T)
        return result


@quiet
def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    mean = np.mean(x * x, axis=-1, keepdims=True)
    result: F32 = x / np.sqrt(mean + np.float32(eps)) * weight
    return result


@quiet
def rotate(x: F32, cosine: F32, sine: F32) -> F32:
    pairs = cosine.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return np.concatenate([*turned, x[..., 2 * pairs :]], axis=-1)


@quiet
def gate(g: F32, u: F32, activation: Activation) -> F32:
    if activation == "silu":
        activated: F32 = g / (1 + np.exp(-g))
    else:
        y = np.float32(math.sqrt(2 / math.pi)) * (g + np.float32(0.044715) * g * g * g)
        activated = np.float32(0.5) * g * (1 + np.tanh(y))
    return activated * u


@quiet
def attend(
    q: F32, keys: F32, values: F32, positions: NDArray[np.int32], window: int | None = None
) -> F32:
    """Softmax attention; shapes as in `reference_exact.attend`."""
    per_kv_head = q.shape[1] // keys.shape[1]
    keys = keys.repeat(per_kv_head, axis=1).transpose(1, 2, 0)
    values = values.repeat(per_kv_head, axis=1).transpose(1, 0, 2)
    scores = q.transpose(1, 0, 2) @ keys  # [heads, rows, tokens]
    hidden = np.arange(scores.shape[-1]) > positions[:, np.newaxis]
    if window is not None:
        hidden |= np.arange(scores.shape[-1]) <= positions[:, np.newaxis] - window
    scores = np.where(hidden, np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result: F32 = np.matmul(weights, values)
    return result.transpose(1, 0, 2)
