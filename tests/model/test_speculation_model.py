"""smollm2-135m answers the same bytes with drafts as without: greedy and seeded, in any batch, cut and preempted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from poise import LLM, SamplingParams
from poise.core.drafting import Draft, Drafter
from poise.core.request import Request
from poise.verify.answers import Answer, ChoiceAnswer, Probe, Token
from poise.verify.drafts import KnowingDrafter, known_answers

SENTENCES = (
    "The capital of France is Paris, the capital of Italy is Rome, the capital of Spain is",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a",
    "Once upon a time there was a fox who lived at the edge of a wood, and every morning the fox",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5,",
    "Dear Sir or Madam, I write to you because the parcel that I ordered on Monday has not",
    "Water boils at a hundred degrees and freezes at",
    "<item>one</item>\n<item>two</item>\n<item>three</item>\n<item>",
    "The harbour had been quiet for most of the winter, and nobody expected the ships",
)
MAX_TOKENS = 16
BATCHES = (1, 2, 3, 5, 8, 16)
LENGTHS = (1, 2, 3, 4, 5, 6)


def prompts(count: int) -> list[str]:
    """Different ones: each sentence cut at different words, some told twice."""
    made = []
    for number in range(count):
        words = SENTENCES[number % len(SENTENCES)].split(" ")
        cut = 3 + (number // len(SENTENCES)) % (len(words) - 3)
        text = " ".join(words[: cut + 1])
        made.append(f"{number}. {text} {text}" if number % 3 == 0 else f"{number}. {text}")
    return made


def params(number: int) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": MAX_TOKENS, "logprobs": 1, "seed": number}
    if number % 2 == 0:
        return SamplingParams(temperature=0, **common)
    return SamplingParams(temperature=0.8, top_p=0.95, **common)


Content = list[tuple[Any, ...]]


def answer(llm: LLM, texts: list[str], numbers: Sequence[int]) -> Content:
    outputs = llm.generate([texts[n] for n in numbers], [params(n) for n in numbers])
    return [
        (tuple(o.prompt_token_ids), c.token_ids, c.text, c.logprobs, c.finish_reason)
        for o in outputs
        for c in o.outputs
    ]


def drafter(content: Content, vocab_size: int) -> KnowingDrafter:
    """Knows the answers, spoils one token in four: with the likeliest other one where it was not the likeliest."""
    probes, answers = [], {}
    for number, (prompt, token_ids, _, logprobs, _) in enumerate(content):
        probes.append(Probe(str(number), prompt, params(number), number))
        tokens = tuple(
            Token(token_id, top=tuple((other, 0) for other in entry))
            for token_id, entry in zip(token_ids, logprobs)
        )
        answers[str(number)] = Answer((ChoiceAnswer(tokens, None),))
    return KnowingDrafter(known_answers(probes, answers), vocab_size)


class FixedLengths:
    """Another drafter's drafts, but no more than k."""

    def __init__(self, inner: Drafter, k: int) -> None:
        self.inner = inner
        self.k = k

    def draft(self, rooms: Any, *rest: Any) -> list[Draft]:
        return [draft.cut(self.k) for draft in self.inner.draft(rooms, *rest)]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.inner.observe(request, num_drafts, num_accepted)

    def forget(self, request: Request) -> None:
        self.inner.forget(request)


def hold(path: Path, num_prompts: int, lengths: tuple[int, ...], batches: tuple[int, ...]) -> int:
    """Each length and each batch meets a third of the prompts, greedy and seeded ones; the next ones others. Returns the number of
    preemptions.
    """
    texts = prompts(num_prompts)
    with LLM(str(path), max_model_len=128) as plain:
        expected = answer(plain, texts, range(num_prompts))
        vocab_size = plain.info.vocab_size
        num_blocks = plain._engine._scheduler.stats().num_total_blocks
        page_bytes = int(plain.info.details["kv_bytes"]) // num_blocks
    speculative = {"method": "ngram", "num_speculative_tokens": max(lengths), "adaptive": False}
    num_preemptions = 0
    for size in batches:
        options: Mapping[str, Any] = {
            "max_num_seqs": size,
            "max_num_batched_tokens": 24 + 7 * size,  # prompts are cut
            "max_model_len": 128,
            "kv_cache_memory_bytes": page_bytes * max(8, 2 * size),  # some are preempted
        }
        with LLM(str(path), speculative_config=speculative, **options) as llm:
            scheduler = llm._engine._scheduler
            drafting = scheduler._drafting
            assert drafting is not None
            own = range(0, num_prompts, 5)  # drafts as requests get them
            assert answer(llm, texts, own) == expected[::5]
            for k in lengths:
                third = [n for n in range(num_prompts) if (n // 2 + k + size) % 3 == 0]
                knowing = drafter(expected, vocab_size)
                drafting.drafter = FixedLengths(knowing, k)
                assert answer(llm, texts, third) == [expected[n] for n in third]
                assert 0 < knowing.num_accepted < knowing.num_drafted
            scheduler.check_invariants()
            num_preemptions += scheduler.stats().counters.num_preemptions
    return num_preemptions


def test_a_few_answers(smollm2_path: Path) -> None:
    assert hold(smollm2_path, 12, (1, 4), (1, 5)) > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", BATCHES)
def test_two_hundred_answers(smollm2_path: Path, size: int) -> None:
    num_preemptions = hold(smollm2_path, 200, LENGTHS, (size,))
    assert num_preemptions > 0 or size < 3  # eight pages or more: enough for two


def write_bf16(source: Path, target: Path) -> Path:
    """By the benchmarks' tool."""
    tool = Path(__file__).parents[2] / "benchmarks" / "as_bf16.py"
    subprocess.run([sys.executable, tool, source, target], check=True)
    return target


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_answers_of_bf16_weights(smollm2_path: Path, tmp_path: Path) -> None:
    assert hold(write_bf16(smollm2_path, tmp_path / "bf16.gguf"), 40, (1, 3, 6), (1, 5)) > 0
