"""Which drafts become tokens under `rejection`, for many rows at once: "Speculation" of docs/NUMERICS.md.

Knows distributions and random numbers that it is handed, no requests and no random streams. The sampler's reference is
these functions over one row, and the native sampler equals the reference in every bit. Invariant: if drafts follow q, tokens
follow p (Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023, appendix A.1).
`coupled` needs no rule: the row draws its token as it would without a draft.

    p, z  float32 [rows, vocab]  the target's probabilities, and their logarithms up to a constant of the row
    q     float32 [rows, vocab]  what the drafts were drawn from; None: each draft was certain
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from poise.kernels.reference_math import F32, divide, exp, log, multiply, row_sum, subtract

Bools = NDArray[np.bool_]
TokenIds = NDArray[np.int64]
IMPOSSIBLE = np.float32(-np.inf)


def probabilities(z: F32) -> F32:
    """Softmax of each row of z; a token at −inf has none."""
    weights = exp(subtract(z, z.max(axis=-1, keepdims=True)))
    return divide(weights, row_sum(weights)[..., np.newaxis])


def accepts(p: F32, q: F32 | None, drafts: TokenIds, u: F32) -> Bools:
    """Whether each row takes its draft: with probability min(1, p / q), u [rows] being uniform in (0, 1)."""
    rows = np.arange(len(drafts))
    bound = np.float32(1) if q is None else q[rows, drafts]
    return multiply(u, bound) < p[rows, drafts]


def residual(z: F32, p: F32, q: F32 | None, drafts: TokenIds) -> F32:
    """Log-weights of what replaces a draft that was not taken: of the positive part of p − q.

    Where rounding leaves that part empty, p is q: log-weights of p.
    """
    if q is None:
        return np.where(np.arange(z.shape[1]) == drafts[:, np.newaxis], IMPOSSIBLE, z)
    surplus = subtract(p, q)
    more = surplus > 0
    weights = np.where(more, log(np.where(more, surplus, np.float32(1))), IMPOSSIBLE)
    return np.where(more.any(axis=1, keepdims=True), weights, z)


def verify(z: F32, q: F32 | None, drafts: TokenIds, u: F32, log_noise: F32) -> TokenIds:
    """The token of each row: its draft, or a draw from the residual.

    `log_noise` float32 [rows, vocab]: logarithms of exponential variates that nothing else uses.
    """
    p = probabilities(z)
    scores = subtract(residual(z, p, q, drafts), log_noise)
    return np.where(accepts(p, q, drafts, u), drafts, scores.argmax(axis=1))
