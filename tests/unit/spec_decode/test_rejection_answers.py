"""Answers under `rejection` follow the law of no speculation, whoever drafts. Seeds are fixed, so every outcome is too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from chi_square import upper_gamma

from poise import LLM, SamplingParams
from tiny_models import TinyModel, byte_tokens, write_gguf

NUM_DRAWS = 4000
CHOICES = 50
ALLOWED = [40, 41, 42, 43]
PROMPT = [40, 41, 42, 43] * 4
METHODS = ("ngram", "suffix", "self", "draft_model")
ALPHA = 1e-3 / (2 * len(METHODS))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    """By method: the same target, with itself or another model to draft."""
    folder = tmp_path_factory.mktemp("models")
    target = TinyModel("llama", num_heads=6, num_kv_heads=2, seed=1)
    other = TinyModel("llama", num_layers=3, num_heads=2, num_kv_heads=1, seed=9)
    metadata = {"tokenizer.ggml.tokens": [*byte_tokens(target.vocab_size)[:-1], "ab"]}.items()
    for name, model in (("target", target), ("other", other)):
        write_gguf(folder / f"{name}.gguf", model, "Q8_0", metadata=metadata)
    path = str(folder / "target.gguf")
    drafting = {"method": "draft_model", "model": str(folder / "other.gguf")}
    with (
        LLM(path, max_model_len=64, speculative_config={"method": "self"}) as own,
        LLM(path, max_model_len=64, speculative_config=drafting) as drafted,
    ):
        yield dict.fromkeys(("ngram", "suffix", "self"), own) | {"draft_model": drafted}


@pytest.fixture(scope="module")
def llm(engines: dict[str, LLM]) -> LLM:
    return engines["ngram"]


def answers(llm: LLM, speculative: Any, first_seed: int) -> Counter[tuple[int, ...]]:
    """The last two of three tokens, `NUM_DRAWS` times."""
    params = [
        SamplingParams(
            temperature=0.8,
            presence_penalty=0.3,
            top_p=0.95,
            n=CHOICES,
            seed=first_seed + number,
            max_tokens=3,
            allowed_token_ids=ALLOWED,
            ignore_eos=True,
            speculative=speculative,
        )
        for number in range(NUM_DRAWS // CHOICES)
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(params), params)
    return Counter(tuple(c.token_ids[1:]) for output in outputs for c in output.outputs)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Counter[tuple[int, ...]]:
    return answers(llm, False, 0)


def same_law(a: Counter[tuple[int, ...]], b: Counter[tuple[int, ...]]) -> float:
    """p-value of two samples of equal size from one law (Pearson); cells of fewer than 20 together are pooled."""
    cells = [(a[key], b[key]) for key in a.keys() | b.keys()]
    large = [cell for cell in cells if sum(cell) >= 20]
    rest = [sum(cell[i] for cell in cells if sum(cell) < 20) for i in (0, 1)]
    large += [(rest[0], rest[1])] if sum(rest) else []
    statistic = sum((x - y) ** 2 / (x + y) for x, y in large)
    return upper_gamma((len(large) - 1) / 2, statistic / 2)


@pytest.mark.parametrize("method", METHODS)
def test_two_tokens_follow_the_same_law(
    engines: dict[str, LLM], plain: Counter[tuple[int, ...]], method: str
) -> None:
    llm = engines[method]
    speculative = {"method": method, "acceptance": "rejection", "num_speculative_tokens": 2}
    before = llm._engine._scheduler.draft_counters.num_accepted_tokens
    drawn = answers(llm, speculative, 10_000)
    accepted = llm._engine._scheduler.draft_counters.num_accepted_tokens - before
    assert accepted > NUM_DRAWS / 20
    assert sum(drawn.values()) == sum(plain.values()) == NUM_DRAWS
    assert same_law(drawn, plain) > ALPHA


def test_the_comparison_sees_a_moved_law(llm: LLM, plain: Counter[tuple[int, ...]]) -> None:
    moved = Counter(plain)
    first = max(plain, key=lambda key: plain[key])
    last = min(plain, key=lambda key: plain[key])
    shift = plain[first] // 3
    moved[first] -= shift
    moved[last] += shift
    assert same_law(moved, plain) < 1e-9


def test_coupled_answers_are_the_very_same(
    engines: dict[str, LLM], plain: Counter[tuple[int, ...]]
) -> None:
    for method, llm in engines.items():
        assert answers(llm, {"method": method, "num_speculative_tokens": 2}, 0) == plain


def test_greedy_rejection_gives_the_very_same_bytes(engines: dict[str, LLM]) -> None:
    def tokens(llm: LLM, speculative: Any) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=30, speculative=speculative)
        return list(llm.generate([{"prompt_token_ids": PROMPT}], params)[0].outputs[0].token_ids)

    plain = tokens(engines["self"], False)
    for method, llm in engines.items():
        assert tokens(llm, {"method": method, "acceptance": "rejection"}) == plain
