"""The numpy twin of the native sampler: "Logits and sampling" of docs/NUMERICS.md, written out in its own words.

Owns no speed: everything is sorted and computed in full. Bitwise equal to every native variant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from poise.kernels.reference_math import (
    F32,
    add,
    divide,
    exp,
    flush_denormals,
    fma32,
    log,
    log_sum_exp,
    multiply,
    row_sum,
    subtract,
)
from poise.spec_decode.acceptance import verify

Bools = NDArray[np.bool_]
GREEDY_BELOW = np.float32(1e-5)
TOKEN_STREAM, ACCEPTANCE_STREAM, RESIDUAL_STREAM = 0, 1, 2
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True, slots=True)
class Row:
    """One row to sample. `target` ≥ 0 reports that token instead; `num_logprobs` −1 reports nothing.

    `draft` ≥ 0 is accepted or another token drawn, by the rule of `rejection`; it was drawn from
    `draft_probabilities` [vocab], or was certain.
    """

    seed: int = 0
    position: int = 0
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] | None = None
    banned: Sequence[int] = ()
    num_logprobs: int = -1
    target: int = -1
    draft: int = -1
    draft_probabilities: F32 | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """`status` is 0, or 1 for logits that are not finite, or 2 where no candidate is left."""

    status: int
    token_id: int = -1
    logprob: np.float32 | float = 0.0
    rank: int = 0
    top: tuple[tuple[int, np.float32], ...] = ()


def sample_row(logits: F32, row: Row) -> Result:
    """Draws or scores one token from `logits` [vocab]."""
    if not (logits < np.inf).all():
        return Result(1)
    if (logits == -np.inf).all():
        return Result(2)
    token = row.target
    if token < 0:
        z = processed_logits(logits, row)
        if (z == -np.inf).all():
            return Result(2)
        if np.float32(row.temperature) < GREEDY_BELOW:
            token = int(np.argmax(z))
        else:
            kept = filter_tokens(z, row)
            certain = z.max() == np.inf  # an overflow: no probabilities
            verifies = 0 <= row.draft < len(z) and not certain
            token = verify_draft(z, kept, row) if verifies else draw(z, kept, row, TOKEN_STREAM)
            assert kept[token]
    if row.num_logprobs < 0:
        return Result(0, token)
    return score(logits, token, row.num_logprobs)


def processed_logits(logits: F32, row: Row) -> F32:
    """Logits after masks, bias, penalties and temperature; a removed token is −inf."""
    removed = np.zeros(len(logits), dtype=bool)
    if row.allowed is not None:
        removed[:] = True
        removed[list(row.allowed)] = False
    removed[list(row.banned)] = True
    z = np.where(removed, np.float32(-np.inf), flush_denormals(logits))
    for token, bias in row.bias.items():
        z[token] = add(z[token], np.float32(bias))
    z = _penalised(z, row)
    temperature = np.float32(row.temperature)
    return z if temperature < GREEDY_BELOW else divide(z, temperature)


def _penalised(z: F32, row: Row) -> F32:
    counts = np.bincount(np.asarray(row.output, np.int64), minlength=len(z))
    seen = counts > 0
    seen[list(row.prompt)] = True
    r = np.float32(row.repetition_penalty)
    z = np.where(seen, np.where(z > 0, divide(z, r), multiply(z, r)), z)
    lowered = fma32(-np.float32(row.frequency_penalty), counts.astype(np.float32), z)
    return np.where(counts > 0, subtract(lowered, np.float32(row.presence_penalty)), z)


def filter_tokens(z: F32, row: Row) -> Bools:
    """Which tokens min-p, top-k and top-p leave."""
    kept = z > -np.inf
    top = z.max()
    min_p = flush_denormals(np.float32(row.min_p))
    if min_p > 0:
        kept &= z >= add(top, log(min_p))
    order = np.lexsort((np.arange(len(z)), -z))
    if row.top_k > 0:
        survivors = [token for token in order if kept[token]][: row.top_k]
        kept = np.isin(np.arange(len(z)), survivors)
    if np.float32(row.top_p) < 1:
        weights = np.where(kept, exp(subtract(z, top)), np.float32(0))
        enough = multiply(np.float32(row.top_p), row_sum(weights))
        order = order[kept[order]]
        reached = np.cumsum(weights[order], dtype=np.float32) >= enough
        if reached.any():
            kept = np.isin(np.arange(len(z)), order[: int(np.argmax(reached)) + 1])
    return kept


def draw(z: F32, kept: Bools, row: Row, stream: int) -> int:
    """The token that Gumbel-max draws among those kept."""
    scores = subtract(z, log_noise(row, len(z), stream))
    return int(np.argmax(np.where(kept, scores, np.float32(-np.inf))))


def verify_draft(z: F32, kept: Bools, row: Row) -> int:
    """The row's draft, or another token in its place, by the rule of spec_decode/acceptance."""
    q = None if row.draft_probabilities is None else row.draft_probabilities[np.newaxis]
    left = np.where(kept, z, np.float32(-np.inf))[np.newaxis]
    noise = log_noise(row, len(z), RESIDUAL_STREAM)[np.newaxis]
    return int(verify(left, q, np.array([row.draft]), acceptance_uniform(row), noise)[0])


def acceptance_uniform(row: Row) -> F32:
    """[1], between 0 and 1: what decides about the draft at this position."""
    counter = (0, row.position, row.choice, ACCEPTANCE_STREAM)
    words = philox(counter, (row.seed & 0xFFFFFFFF, row.seed >> 32))
    return uniform(words[0, :1])


def log_noise(row: Row, vocab: int, stream: int) -> F32:
    """log(E) with E the exponential variate that belongs to each token."""
    blocks = np.arange(-(-vocab // 4), dtype=np.uint32)
    counter = (blocks, row.position, row.choice, stream)
    words = philox(counter, (row.seed & 0xFFFFFFFF, row.seed >> 32)).reshape(-1)[:vocab]
    return log(exponential(words))


def uniform(words: NDArray[np.uint32]) -> F32:
    """A number between 0 and 1, without both, from each random word."""
    u = multiply(add(words.astype(np.float32), np.float32(0.5)), np.float32(2.0**-32))
    below_one: F32 = np.minimum(u, np.float32(1 - 2.0**-24))
    return below_one


def exponential(words: NDArray[np.uint32]) -> F32:
    """An exponential variate from each random word, accurate down to 2⁻³³."""
    u = uniform(words)
    one = np.float32(1)
    t = subtract(one, u)
    return -add(log(t), divide(subtract(subtract(one, t), u), t))


def philox(
    counter: tuple[NDArray[np.uint32] | int, int, int, int], key: tuple[int, int]
) -> NDArray[np.uint32]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    The first counter word may be an array of n: returns [n, 4].
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.atleast_1d(c).astype(np.uint64) for c in counter))
    k0, k1 = key
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        first = c0 * np.uint64(PHILOX_MULTIPLIERS[0])
        second = c2 * np.uint64(PHILOX_MULTIPLIERS[1])
        c0 = (second >> shift) ^ c1 ^ np.uint64(k0)
        c1 = second & low
        c2 = (first >> shift) ^ c3 ^ np.uint64(k1)
        c3 = first & low
        k0 = (k0 + PHILOX_WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + PHILOX_WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def score(logits: F32, token: int, num_top: int) -> Result:
    """Log-probability and rank of `token`, and the best `num_top` tokens, from raw logits."""
    z = flush_denormals(logits)
    logprobs = subtract(z, log_sum_exp(z))
    rank = 1 + int(np.count_nonzero(z > z[token]))
    order = np.lexsort((np.arange(len(z)), -z))[:num_top]
    top = tuple((int(v), logprobs[v]) for v in order if z[v] > -np.inf)
    return Result(0, token, logprobs[token], rank, top)
