"""Answers a fixed set of requests under settings given as JSON, and prints what must not depend on them.

Run by test_optimisations.py in a process of its own: python optimisation_answers.py '{"threads": "1"}'
"""

from __future__ import annotations

import json
import sys

from poise import LLM, SamplingParams
from poise.config import resolve
from poise.engine.build import build_engine

PREFIX = "A record of what happened in the harbour on the first day of the storm. " * 12
QUESTIONS = ("Who came first?", "What was lost?", "Where did they go, and why so late?", "When?")


def main(given: dict[str, object]) -> None:
    settings = resolve(given, environment={})
    engine = build_engine(settings.source, settings.cache, settings.scheduler, settings.compute)
    with LLM.from_engine(engine) as llm:
        prompts = [PREFIX + question for question in QUESTIONS] + list(QUESTIONS)
        params = [
            SamplingParams(temperature=(index % 2) * 0.8, seed=index, max_tokens=8, logprobs=2)
            for index in range(len(prompts))
        ]
        rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    cached = sum(output.num_cached_tokens for outputs in rounds for output in outputs)
    answers = [
        [choice.token_ids, choice.text, choice.finish_reason, _bits(choice.logprobs)]
        for outputs in rounds
        for output in outputs
        for choice in output.outputs
    ]
    print(json.dumps({"answers": answers, "num_cached_tokens": cached}))


def _bits(logprobs: object) -> list[list[tuple[int, str]]]:
    assert isinstance(logprobs, list)
    return [
        [(token, entry.logprob.hex()) for token, entry in sorted(position.items())]
        for position in logprobs
    ]


main(json.loads(sys.argv[1]))
