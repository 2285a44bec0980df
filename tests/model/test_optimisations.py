"""Each exact optimisation taken away: the same ids, text, finish reasons and logprob bits as with it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from poise.optimisations import OPTIMISATIONS

PROGRAM = Path(__file__).parent / "optimisation_answers.py"
SMALL_CHUNKS = '{"max-num-batched-tokens": "64"}'  # so that prompts are cut with the default too


@cache
def answers(settings: str) -> dict[str, Any]:
    output = subprocess.run(
        [sys.executable, str(PROGRAM), settings], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "entry", [entry for entry in OPTIMISATIONS if entry.off], ids=lambda entry: entry.name
)
def test_without_it_the_answers_are_the_same(entry: Any) -> None:
    assert entry.kind == "exact"
    usual = answers(SMALL_CHUNKS)
    without = answers(json.dumps(json.loads(SMALL_CHUNKS) | entry.off))
    assert without["answers"] == usual["answers"]


def test_the_prefix_cache_was_used_and_could_be_switched_off() -> None:
    assert answers(SMALL_CHUNKS)["num_cached_tokens"] > 0
    off = json.dumps(json.loads(SMALL_CHUNKS) | {"enable-prefix-caching": "false"})
    assert answers(off)["num_cached_tokens"] == 0


@pytest.mark.parametrize("block_size", ["32", "64"])
def test_the_block_size_changes_nothing(block_size: str) -> None:
    other = answers(json.dumps(json.loads(SMALL_CHUNKS) | {"block-size": block_size}))
    assert other["answers"] == answers(SMALL_CHUNKS)["answers"]
