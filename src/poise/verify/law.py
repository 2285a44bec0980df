"""The check of `rejection`: what it keeps of drafts follows the target's law, in numpy and in the native sampler.

Knows distributions small enough to count. Invariant: all randomness is fixed, so an outcome repeats; a right rule passes,
since no count may be further than SIGMAS standard deviations off, which chance makes once in 10⁸ counts.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from poise.kernels.cpu import isa, native
from poise.kernels.reference_math import F32, log
from poise.sampling.rows import OK, RESULT_TYPE, ROW_TYPE
from poise.spec_decode import acceptance
from poise.verify.trials import Trials

VOCAB: Final = 12
NUM_DRAWS: Final = 20_000
SIGMAS: Final = 6.0
SEED: Final = 20260722
SAMPLES: Final = {"draft near the target": 0.5, "draft far from it": 2.0}  # by noise on its logits

TokenIds = NDArray[np.int64]


def rejection(trials: Trials) -> None:
    """Draws that begin with drafts, counted against the target's probabilities."""
    rng = np.random.default_rng(SEED)
    for name, noise in SAMPLES.items():
        target = rng.standard_normal(VOCAB).astype(np.float32)
        target[3] = -np.inf  # the target never draws it, the draft does
        draft = np.where(np.isfinite(target), target, 0) + noise * rng.standard_normal(VOCAB)
        z = np.tile(target, (NUM_DRAWS, 1))
        p = acceptance.probabilities(z)
        q = acceptance.probabilities(draft.astype(np.float32)[None])
        rows = q.repeat(NUM_DRAWS, 0)
        drafts = rng.choice(
            VOCAB, NUM_DRAWS, p=q[0].astype(np.float64) / q[0].sum(dtype=np.float64)
        )
        certain = np.full(NUM_DRAWS, 5)
        for kind, tokens, given in (
            ("numpy", _in_numpy(z, rows, drafts, rng), drafts),
            ("numpy, certain drafts", _in_numpy(z, None, certain, rng), certain),
            ("native", _native(z, q[0], drafts), drafts),
            ("native, certain drafts", _native(z, None, certain), certain),
        ):
            _hold(trials, f"{name}, {kind}", tokens, p[0])
            trials.fired("drafts accepted", int((tokens == given).sum()))
            trials.fired("drafts replaced", int((tokens != given).sum()))


def _in_numpy(z: F32, q: F32 | None, drafts: TokenIds, rng: np.random.Generator) -> TokenIds:
    u = rng.random(len(z), dtype=np.float32)
    noise = log(rng.exponential(size=z.shape).astype(np.float32))
    return acceptance.verify(z, q, drafts, u, noise)


def _native(z: F32, q: F32 | None, drafts: TokenIds) -> TokenIds:
    """Each row with a seed of its own."""
    records = np.zeros(len(z), ROW_TYPE)
    records["seed"] = np.arange(len(z))
    for name in ("temperature", "top_p", "repetition_penalty"):
        records[name] = 1
    for name in ("num_logprobs", "target"):
        records[name] = -1
    records["draft"] = drafts
    records["draft_probabilities"] = 0 if q is None else q.ctypes.data
    data = native.sample_rows(np.ascontiguousarray(z), records.view(np.uint8), isa())
    results = np.frombuffer(data, RESULT_TYPE)
    assert (results["status"] == OK).all()
    return results["token_id"].astype(np.int64)


def _hold(trials: Trials, varied: str, tokens: TokenIds, p: F32) -> None:
    """Every token's count against its probability."""
    counts = np.bincount(tokens, minlength=VOCAB)
    for token, (count, share) in enumerate(zip(counts.tolist(), p.astype(np.float64).tolist())):
        slack = SIGMAS * np.sqrt(NUM_DRAWS * share * (1 - share))
        low, high = NUM_DRAWS * share - slack, NUM_DRAWS * share + slack
        within = low <= count <= high
        expected = count if within else f"{low:.0f} … {high:.0f} times of {NUM_DRAWS}"
        setup = "law of what is kept"
        trials.expect(varied, setup, f"token {token}", expected, count)
