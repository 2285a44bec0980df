"""Whole answers of tiny models are the same bytes with speculation as without: in any mix, cut, stopped and preempted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from poise import LLM, RequestOutput, SamplingParams
from poise.core.drafting import Draft, DraftRoom
from poise.core.request import Request
from poise.core.step_time import StepShape, StepTimeModel
from poise.errors import ConfigError
from poise.executor import load, step_cost
from tiny_models import TinyModel, byte_tokens, write_gguf

MODELS = {
    "llama": TinyModel("llama", num_heads=6, num_kv_heads=2, seed=1),
    "gemma3": TinyModel(
        "gemma3", num_layers=4, num_kv_heads=1, head_dim=64, window_period=3, sliding_window=24
    ),
}
NUM_PROMPTS = 14
PROMPTS = [
    [3 + (7 * i + j * j) % 97 for j in range(1 + (11 * i) % 37)]
    if i % 3
    else [5, 6, 7, 8] * (2 + i)
    for i in range(NUM_PROMPTS)
]


def parameters(index: int) -> SamplingParams:
    """Every parameter of the sampler and every way to end, in turn."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.3},
        {"temperature": 0, "frequency_penalty": 0.7, "logit_bias": {9: 3.0, 11: -5.0}},
        {"temperature": 0.7, "n": 3, "max_tokens": 9},
        {"temperature": 0.5, "min_tokens": 12, "stop_token_ids": list(range(20, 120))},
        {"temperature": 0, "prompt_logprobs": 1, "logprobs": 5},
        {"temperature": 0.9, "allowed_token_ids": list(range(60, 90)), "bad_words": ["ab", "b"]},
        {"temperature": 0, "stop": ["!", "a", "Q1"], "min_tokens": 3},
        {"temperature": 1.0, "max_tokens": 1},
        {"temperature": 0.3, "stop": ["e", "x", "0"], "include_stop_str_in_output": True},
    ]
    common = {"max_tokens": 24, "logprobs": 1, "seed": 100 + index, "ignore_eos": index % 2 == 0}
    return SamplingParams(**{**common, **asked[index % len(asked)]})


class KnowingDrafter:
    """Drafts the answers that were given without speculation, some tokens spoilt: any acceptance, at any place."""

    def __init__(self, answers: dict[tuple[tuple[int, ...], int, int], list[int]]) -> None:
        self.answers = answers
        self.random = random.Random(5)
        self.num_drafts = 0
        self.num_accepted = 0
        self.cut = 0  # answers that ended inside an accepted run

    def draft(
        self, rooms: Sequence[DraftRoom], shape: StepShape, step_time: StepTimeModel
    ) -> list[Draft]:
        return [self._draft(*room) for room in rooms]

    def _draft(self, request: Request, most: int) -> Draft:
        sampling = request.sampling
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        known = self.answers[prompt, sampling.seed, sampling.choice]
        drafts = known[request.num_output_tokens :][:most]
        drafts += [7] * (most - len(drafts))  # past a stop
        if self.random.random() < 0.5:
            drafts[self.random.randrange(most)] = self.random.randrange(288)
        return Draft(most, tuple(drafts))

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def forget(self, request: Request) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=["llama", "gemma3", "llama-int8"], scope="module")
def roomy(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """An engine with room for everybody, and what others of its model are made with."""
    architecture, _, dtype = request.param.partition("-")
    options: dict[str, Any] = {"kv_cache_dtype": dtype or "bf16", "threads": 2}
    options["model"] = str(folder / f"{architecture}.gguf")
    model = MODELS[architecture]
    tokens = [*byte_tokens(model.vocab_size)[:-1], "ab"]
    metadata = {"tokenizer.ggml.tokens": tokens}.items()
    write_gguf(Path(options["model"]), model, "Q8_0", metadata=metadata)
    with LLM(**options, max_model_len=96) as llm:
        yield llm, options


def generate(llm: LLM, speculative: Any = None) -> list[Any]:
    params = [parameters(index) for index in range(NUM_PROMPTS)]
    for asked in params:
        object.__setattr__(asked, "speculative", speculative)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    llm._engine._scheduler.check_invariants()
    return [content(output) for output in outputs]


def content(output: RequestOutput) -> Any:
    choices = [
        (c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs
    ]
    return output.prompt_token_ids, output.prompt_logprobs, choices


def knowing(llm: LLM, answers: list[Any]) -> KnowingDrafter:
    drafter = KnowingDrafter(
        {
            (tuple(prompt), 100 + index, choice): list(answer[0])
            for index, (prompt, _, choices) in enumerate(answers)
            for choice, answer in enumerate(choices)
        }
    )
    drafting = llm._engine._scheduler._drafting
    assert drafting is not None
    drafting.drafter = drafter
    return drafter


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_answers_are_the_same_bytes(roomy: tuple[LLM, dict[str, Any]], k: int) -> None:
    llm, options = roomy
    expected = generate(llm)
    small = cramped_limits(llm, k)
    speculative = {"method": "ngram", "num_speculative_tokens": k, "adaptive": False}
    with LLM(**options, **small) as cramped:
        drafter = knowing(cramped, expected)
        assert generate(cramped, speculative) == expected
        assert cramped._engine._scheduler.stats().counters.num_preemptions > 0
        assert 0 < drafter.num_accepted < drafter.num_drafts
    original = llm._engine._scheduler._drafting.drafter  # type: ignore[union-attr]
    drafter = knowing(llm, expected)
    assert generate(llm, speculative) == expected  # prompts are in the cache now
    assert 0 < drafter.num_accepted < drafter.num_drafts
    llm._engine._scheduler._drafting.drafter = original  # type: ignore[union-attr]
    for method in ("ngram", "suffix"):
        looking = {**speculative, "method": method, "prompt_lookup_min": 1}
        before = llm._engine._scheduler.draft_counters.num_accepted_tokens
        assert generate(llm, looking) == expected
        assert llm._engine._scheduler.draft_counters.num_accepted_tokens > before


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("k", [1, 4])
def test_rejection_gives_the_same_bytes_at_any_load(
    roomy: tuple[LLM, dict[str, Any]], method: str, k: int
) -> None:
    """Other bytes than without drafts, but the same ones whether drafts get their rows or not."""
    llm, options = roomy
    speculative = {
        "method": method,
        "acceptance": "rejection",
        "num_speculative_tokens": k,
        "prompt_lookup_min": 1,
    }
    expected = generate(llm, speculative)
    assert expected != generate(llm)
    counters = llm._engine._scheduler.draft_counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert generate(llm, speculative) == expected  # with hits
    for small in (cramped_limits(llm, k), cramped_limits(llm, 0)):  # no room for any, nearly
        with LLM(**options, **small) as cramped:
            assert generate(cramped, speculative) == expected
            scheduler = cramped._engine._scheduler
            assert scheduler.draft_counters.num_draft_tokens < counters.num_draft_tokens
            assert scheduler.stats().counters.num_preemptions > 0


@pytest.mark.parametrize("k", [1, 4])
def test_answers_are_the_same_bytes_where_the_model_drafts_itself(
    roomy: tuple[LLM, dict[str, Any]], k: int
) -> None:
    llm, options = roomy
    expected = generate(llm)
    small = cramped_limits(llm, k)
    speculative = {"method": "self", "num_speculative_tokens": k, "adaptive": False}
    with LLM(**options, **small, speculative_config={"method": "self"}) as cramped:
        assert generate(cramped, speculative) == expected
        scheduler = cramped._engine._scheduler
        assert scheduler.stats().counters.num_preemptions > 0
        counters = scheduler.draft_counters
        assert 0.2 < counters.num_accepted_tokens / counters.num_draft_tokens < 1
        assert generate(cramped, {**speculative, "adaptive": True}) == expected
        assert generate(cramped, {"method": "ngram", "prompt_lookup_min": 1}) == expected


@pytest.mark.parametrize("method", ["self", "draft_model"])
def test_what_a_draft_takes_is_measured_where_nobody_knows_the_machine(
    roomy: tuple[LLM, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(load, "stored_rates", lambda *machine: None)
    for guess in ("GUESSED_READ_BYTES", "GUESSED_OPERATIONS"):
        monkeypatch.setattr(step_cost, guess, 1.0)  # a draft would take hours
    _, options = roomy
    config = {"method": method, **({"model": options["model"]} if method == "draft_model" else {})}
    with LLM(**options, max_model_len=96, speculative_config=config) as llm:
        drafting = llm._engine._scheduler._drafting
        assert drafting is not None
        controller = drafting.drafter._controller  # type: ignore[attr-defined]
        assert 0 < controller._draft_seconds([1]) < 60


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("draft", ["itself", "another"])
def test_answers_are_the_same_bytes_where_a_model_drafts(
    roomy: tuple[LLM, dict[str, Any]], folder: Path, draft: str, k: int
) -> None:
    llm, options = roomy
    expected = generate(llm)
    path = options["model"]
    if draft == "another":
        path = str(folder / "draft.gguf")
        model = TinyModel("llama", num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16, seed=9)
        tokens = [*byte_tokens(model.vocab_size)[:-1], "ab"]
        write_gguf(Path(path), model, "Q8_0", metadata={"tokenizer.ggml.tokens": tokens}.items())
    drafting = {"speculative_config": {"method": "draft_model", "model": path}}
    speculative = {"method": "draft_model", "num_speculative_tokens": k, "adaptive": False}
    with LLM(**options, **drafting, max_model_len=96) as drafted:
        assert generate(drafted, speculative) == expected
        counters = drafted._engine._scheduler.draft_counters
        share = counters.num_accepted_tokens / counters.num_draft_tokens
        assert share > 0.93 if draft == "itself" else share < 0.5  # past a stop all are wrong
        small = cramped_limits(drafted, k)
    with LLM(**options, **drafting, **small) as cramped:
        assert generate(cramped, speculative) == expected
        assert cramped._engine._scheduler.stats().counters.num_preemptions > 0
        assert generate(cramped, {**speculative, "adaptive": True}) == expected
        assert generate(cramped, False) == expected
        assert generate(cramped, speculative) == expected  # what others left has no draft's KV


def test_a_draft_of_another_vocabulary_is_refused(folder: Path) -> None:
    model = MODELS["llama"]
    tokens = [*byte_tokens(model.vocab_size)[:-1], "ab"]
    path, other = folder / "vocabulary.gguf", folder / "other.gguf"
    write_gguf(path, model, "Q8_0", metadata={"tokenizer.ggml.tokens": tokens}.items())
    swapped = [*tokens[:50], tokens[51], tokens[50], *tokens[52:]]
    write_gguf(other, model, "Q8_0", metadata={"tokenizer.ggml.tokens": swapped}.items())
    with pytest.raises(ConfigError, match="another vocabulary: token 50 is"):
        LLM(str(path), speculative_config={"method": "draft_model", "model": str(other)})


def cramped_limits(llm: LLM, k: int) -> dict[str, Any]:
    """Prompts are cut, and there are pages for some of the requests only."""
    return {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 6 + 3 * k,
        "max_model_len": 96,
        "kv_cache_memory_bytes": 6 * llm_page_bytes(llm) * len(kv_groups(llm)),
    }


def kv_groups(llm: LLM) -> Sequence[Any]:
    return llm._engine._scheduler._kv_cache.no_blocks


def llm_page_bytes(llm: LLM) -> int:
    details = llm.info.details
    return int(details["kv_bytes"]) // llm._engine._scheduler._kv_cache.pool.num_blocks
