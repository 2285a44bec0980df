"""`rejection` keeps the target's law, and the test would notice if it did not.

A world small enough to know the law of every answer: 4 tokens, answers of k + 1 tokens, target and draft whose logits
depend on the last token, and the samplers of the real thing over them. Seeds are fixed, so every outcome is too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from chi_square import p_value, upper_gamma
from numpy.typing import NDArray

from poise.kernels.reference_math import log
from poise.sampling import reference
from poise.sampling.reference import Row
from poise.spec_decode import acceptance

VOCAB = 4
LENGTHS = range(1, 6)  # k
TRIALS = 20_000
SEED = 20260722
SAMPLERS = {
    "temperature": Row(temperature=0.7),
    "top-p": Row(top_p=0.85),
    "penalties": Row(presence_penalty=0.9, frequency_penalty=0.4, repetition_penalty=1.3),
}
NUM_TESTS = len(SAMPLERS) * len(LENGTHS) * 2
ALPHA = 1e-3 / NUM_TESTS
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def test_the_worked_example() -> None:
    """Accepted mass and residual are p; accepting everything is not."""
    p, q = np.float32([[0.2, 0.5, 0.3]]), np.float32([[0.6, 0.3, 0.1]])
    z = log(p)
    mass = np.minimum(p, q).sum()
    weights = np.exp(acceptance.residual(z, p, q, np.array([0]))[0])
    emitted = np.minimum(p, q)[0] + (1 - mass) * weights / weights.sum()
    assert mass == pytest.approx(0.6)
    assert weights / weights.sum() == pytest.approx([0, 0.5, 0.5])
    assert emitted == pytest.approx([0.2, 0.5, 0.3])
    assert q[0] != pytest.approx([0.2, 0.5, 0.3], abs=0.1)


def test_the_acceptance_of_a_token_is_the_smaller_of_1_and_p_over_q() -> None:
    p, q = np.float32([[0.2, 0.5, 0.3]]), np.float32([[0.6, 0.3, 0.1]])
    u = (np.arange(3000, dtype=np.float32) + np.float32(0.5)) / np.float32(3000)
    for token, share in enumerate([1 / 3, 1, 1]):
        drafts = np.full(3000, token)
        taken = acceptance.accepts(p.repeat(3000, 0), q.repeat(3000, 0), drafts, u)
        assert taken.mean() == pytest.approx(share, abs=1e-3)
        assert acceptance.accepts(p.repeat(3000, 0), None, drafts, u).mean() == pytest.approx(
            p[0, token], abs=1e-3
        )


@pytest.mark.parametrize(
    ("a", "x", "value"),
    [(0.5, 1.920729, 0.05), (3.5, 12.161, 0.001000), (50, 74.72, 0.001), (50, 40, 0.929659)],
)
def test_the_incomplete_gamma_function(a: float, x: float, value: float) -> None:
    """Quantiles of chi-square from any table, halved."""
    assert upper_gamma(a, x) == pytest.approx(value, rel=2e-3)


# --- the small world: nodes of a tree are histories, children(n) = 4 n + 1 … 4 n + 4 -------------


@dataclass(frozen=True)
class World:
    """Log-weights of the next token at each history: float32 [nodes, 4]. `stale[j]` knows nothing of the last j
    tokens when it penalises.
    """

    target: Floats
    draft: Floats
    stale: tuple[Floats, ...]

    def law(self, length: int) -> NDArray[np.float64]:
        """Of every answer of `length` tokens, answers in the order of their nodes."""
        level, first = np.ones(1), 0
        for _ in range(length):
            nodes = np.arange(first, first + len(level))
            z = self.target[nodes].astype(np.float64)
            weights = np.exp(z - z.max(axis=1, keepdims=True))
            level = (level[:, None] * weights / weights.sum(axis=1, keepdims=True)).reshape(-1)
            first = VOCAB * first + 1
        return level


def path(node: int) -> list[int]:
    tokens: list[int] = []
    while node:
        tokens.append((node - 1) % VOCAB)
        node = (node - 1) // VOCAB
    return tokens[::-1]


@cache
def world(sampler: str) -> World:
    rng = np.random.default_rng(7)
    target = (rng.standard_normal((VOCAB + 1, VOCAB)) * 1.2).astype(np.float32)
    draft = target + (rng.standard_normal(target.shape) * 0.8).astype(np.float32)
    histories = [path(node) for node in range((VOCAB ** max(LENGTHS) * VOCAB - 1) // (VOCAB - 1))]

    penalises = sampler == "penalties"

    def table(logits: Floats, num_unseen: int = 0) -> Floats:
        @cache
        def left(last: int, seen: tuple[int, ...]) -> Floats:
            row = replace(SAMPLERS[sampler], output=seen, prompt=[1])
            z = reference.processed_logits(logits[last], row)
            return np.where(reference.filter_tokens(z, row), z, np.float32(-np.inf))

        rows = []
        for history in histories:
            seen = sorted(history[: max(0, len(history) - num_unseen)]) if penalises else ()
            rows.append(left(history[-1] if history else VOCAB, tuple(seen)))
        return np.array(rows, np.float32)

    stale = range(max(LENGTHS) + 1) if penalises else ()
    return World(table(target), table(draft), tuple(table(target, j) for j in stale))


# --- speculation in it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How to speculate; the defaults are right."""

    verify: Callable[..., Any] = acceptance.verify
    bonus: Callable[[World, Ints], Floats] = lambda world, nodes: world.target[nodes]
    scored: Callable[[World, Ints, Ints], Floats] = lambda world, nodes, _: world.target[nodes]


def words(trials: Ints, positions: Ints, stream: int) -> NDArray[np.uint32]:
    """The first counter's words [n, 4]: those of 4 tokens, or one that decides."""
    return reference.philox(
        (np.zeros(len(trials), np.uint32), positions, trials, stream),  # type: ignore[arg-type]
        (SEED, 0),
    )


def log_noise(trials: Ints, positions: Ints, stream: int) -> Floats:
    u = (words(trials, positions, stream) + 0.5) / 2.0**32
    return np.log(-np.log1p(-u)).astype(np.float32)


def answers(world: World, k: int, rule: Rule, certain: bool) -> Ints:
    """How often each answer of k + 1 tokens came out of `TRIALS` that draft up to k tokens at a time."""
    length = k + 1
    nodes, lengths = np.zeros(TRIALS, np.int64), np.zeros(TRIALS, np.int64)
    while (lengths < length).any():
        going = lengths < length
        for place in range(k + 1):
            at = np.flatnonzero(going)
            where, positions = nodes[at], lengths[at]
            has_draft = (positions < length - 1) & (place < k)
            noise = log_noise(at, positions, reference.TOKEN_STREAM)
            q = acceptance.probabilities(world.draft[where])
            drafts = world.draft[where].argmax(axis=1) if certain else (
                world.draft[where] - noise).argmax(axis=1)  # fmt: skip
            verified = rule.verify(
                rule.scored(world, where, np.full(len(at), place)),
                None if certain else q,
                drafts,
                reference.uniform(words(at, positions, reference.ACCEPTANCE_STREAM)[:, 0]),
                log_noise(at, positions, reference.RESIDUAL_STREAM),
            )
            drawn = (rule.bonus(world, where) - noise).argmax(axis=1)
            tokens = np.where(has_draft, verified, drawn)
            nodes[at] = VOCAB * where + 1 + tokens
            lengths[at] += 1
            going[at] = has_draft & (tokens == drafts) & (lengths[at] < length)
            if not going.any():
                break
    first = (VOCAB**length - 1) // (VOCAB - 1)
    return np.bincount(nodes - first, minlength=VOCAB**length)


@pytest.mark.parametrize("certain", [False, True], ids=["drawn drafts", "certain drafts"])
@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_answers_follow_the_target(sampler: str, k: int, certain: bool) -> None:
    small = world(sampler)
    assert p_value(answers(small, k, Rule(), certain), small.law(k + 1)) > ALPHA


def accept_all(z: Floats, q: Floats, drafts: Ints, u: Floats, noise: Floats) -> Ints:
    return drafts


def residual_from_q(z: Floats, q: Floats, drafts: Ints, u: Floats, noise: Floats) -> Ints:
    taken = acceptance.accepts(acceptance.probabilities(z), q, drafts, u)
    return np.where(taken, drafts, (np.log(q) - noise).argmax(axis=1))


def stale(world: World, nodes: Ints, places: Ints) -> Floats:
    return np.stack(world.stale)[places, nodes]


WRONG = {
    "accept all": ("temperature", Rule(verify=accept_all)),
    "residual from q": ("temperature", Rule(verify=residual_from_q)),
    "no bonus": ("temperature", Rule(bonus=lambda world, nodes: world.draft[nodes])),
    "stale penalties": ("penalties", Rule(scored=stale)),
}


def wrong_cases() -> list[tuple[str, int]]:
    """All, but that with one draft nothing comes between the penalties and the draft."""
    return [(w, k) for w in WRONG for k in LENGTHS if (w, k) != ("stale penalties", 1)]


@pytest.mark.parametrize(("wrong", "k"), wrong_cases())
def test_a_wrong_rule_is_found(wrong: str, k: int) -> None:
    sampler, rule = WRONG[wrong]
    small = world(sampler)
    with np.errstate(divide="ignore"):
        assert p_value(answers(small, k, rule, False), small.law(k + 1)) < 1e-9
