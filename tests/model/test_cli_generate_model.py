"""`poise generate` and `poise inspect` with the default model, as a process."""

from __future__ import annotations

import json
import subprocess
import sys

POISE = [sys.executable, "-c", "from poise.cli.main import main; main()"]


def poise(*arguments: str) -> str:
    process = subprocess.run([*POISE, *arguments], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_capital_of_france() -> None:
    answer = poise(
        "generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0"
    )
    assert "Paris" in answer


def test_the_reported_seed_gives_the_answer_again() -> None:
    question = ("generate", "Once upon a time", "--max-tokens", "12", "--json")
    first = json.loads(poise(*question))
    again = json.loads(poise(*question, "--seed", str(first["seed"]), "--threads", "1"))
    assert again == first


def test_inspect_tells_the_kv_cost() -> None:
    facts = poise("inspect", "smollm2-135m")
    assert "23,040 B/token = 22.5 KiB/token" in facts
    assert "KV of 1,000 tokens   23,040,000 B/sequence = 21.9727 MiB/sequence" in facts
    assert "210 Q4_1, 61 F32, 1 Q8_0" in facts
