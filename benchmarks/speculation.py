"""What speculation gains and what it can cost: one server, requests with and without drafts in turn.

    python benchmarks/speculation.py [PART …]
    python benchmarks/speculation_figures.py docs/records/speculation-….json

Each pair sends the same prompts twice, once with `"speculative": {…}` and once with `false`, in alternating order and under salts
of their own, so that neither finds the other's cache. The figure of a pair is the ratio of decoding times (first token to last, summed
over the requests), above 1 where drafts gain; of all pairs the median, with a bootstrap interval. The record goes to docs/records/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from as_bf16 import write_bf16
from poise import LLM, SamplingParams
from poise.bench.client import LoadClient, Target
from poise.bench.managed_server import ManagedServer
from poise.bench.presets import find_spec, placeholders
from poise.bench.record import ClientOptions, RequestRow
from poise.core.step_time import StepShape
from poise.machine import cpu_model, poise_version
from poise.spec_decode.controller import DraftLengthController
from poise.spec_decode.drafter import SpeculativeDrafter
from poise.weights.pull import resolve_model
from records import RECORDS

RESAMPLES = 10_000
PROMPT_TOKENS = 16
PASSAGE_TOKENS = 24
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True)
class Case:
    """One comparison. `text`: random prompts, or repeats that the model goes on with."""

    name: str
    text: str
    batch: int
    speculative: dict[str, Any]
    model: str = "smollm2-135m"
    num_tokens: int = 96
    flags: tuple[str, ...] = ()
    num_repeats: int = 6


LOOKUP = {"method": "suffix", "num_speculative_tokens": 7, "prompt_lookup_min": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2}
FIXED = {**NGRAM, "num_speculative_tokens": 4, "adaptive": False}
SELF = {"method": "self", "num_speculative_tokens": 4}
SELF_FLAGS = ("--spec-method", "self")
BF16_MODEL = "smollm2-135m-bf16"  # made here: the shipped weights, dequantised
BATCHES = (1, 2, 4, 8, 16, 32)

PARTS: dict[str, list[Case]] = {
    **{
        f"random-{batch}": [
            Case(
                f"random text, batch {batch}, {method['method']}",
                "random",
                batch,
                method,
                num_tokens=num_tokens,
            )
            for method in (NGRAM, LOOKUP)
        ]
        for batch, num_tokens in ((1, 96), (32, 16))
    },
    "repeats": [
        Case(f"repeats, batch 1, {method['method']}", "repeats", 1, method)
        for method in (NGRAM, LOOKUP)
    ],
    "batches": [
        Case(f"{kind} {batch}", "repeats", batch, method, num_tokens=32, num_repeats=3)
        for batch in BATCHES
        for kind, method in (("fixed", FIXED), ("controller", NGRAM))
    ],
    "self": [
        Case("self, gemma3-270m", "random", 1, SELF, "gemma3-270m", 64, SELF_FLAGS),
        Case(
            "self, gemma3-270m, fixed",
            "random",
            1,
            {**SELF, "adaptive": False},
            "gemma3-270m",
            64,
            SELF_FLAGS,
        ),
    ],
    "upper-bound": [
        Case(
            name,
            "random",
            1,
            {**SELF, "num_speculative_tokens": 3, **more},
            BF16_MODEL,
            64,
            SELF_FLAGS,
        )
        for name, more in (
            ("self, smollm2-135m as bf16 (upper bound: identical weights)", {}),
            ("self, smollm2-135m as bf16, fixed", {"adaptive": False}),
        )
    ],
    "self-times": [],
    "predictions": [],
}


@dataclass
class Found:
    """`ratios`: decoding time without drafts over that with them, by pair."""

    ratios: list[float] = field(default_factory=list)
    off_seconds_per_token: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        low, high = interval(self.ratios)
        drafts = self.counters["num_drafts"]
        accepted = self.counters["num_accepted_tokens"]
        drafted = self.counters["num_draft_tokens"]
        return {
            "pairs": len(self.ratios),
            "speedup": statistics.median(self.ratios),
            "interval": [low, high],
            "off_seconds_per_token": statistics.median(self.off_seconds_per_token),
            "acceptance": accepted / drafted if drafted else None,
            "m": 1 + accepted / drafts if drafts else None,
            **self.counters,
            "ratios": self.ratios,
        }


def interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Of the median, by the percentile bootstrap (Efron and Tibshirani, 1993, chapter 13)."""
    toss = random.Random(1)
    medians = sorted(
        statistics.median(toss.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    tail = (1 - confidence) / 2
    return medians[int(tail * RESAMPLES)], medians[int((1 - tail) * RESAMPLES) - 1]


def prompts(case: Case, pair: int) -> list[list[int]]:
    """One for each request of the batch: token ids that any vocabulary has."""
    toss = random.Random(f"{case.text} {pair}")
    found = []
    for _ in range(case.batch):
        length = PROMPT_TOKENS if case.text == "random" else PASSAGE_TOKENS
        passage = [toss.randrange(1000, 20_000) for _ in range(length)]
        found.append(passage if case.text == "random" else passage * case.num_repeats)
    return found


async def block(url: str, case: Case, pair: int, drafts: bool) -> tuple[float, float]:
    """Sends the batch at once; returns seconds of decoding, summed, and per token."""
    options = ClientOptions(timeout_s=120.0)
    target = Target(url, "/v1/completions", case.model)
    rows = [RequestRow(index, 0.0) for index in range(case.batch)]
    async with LoadClient(target, options) as client:
        await asyncio.gather(
            *(
                client.send(body(case, prompt, f"{pair} {drafts} {index}", drafts), rows[index])
                for index, prompt in enumerate(prompts(case, pair))
            )
        )
    seconds = tokens = 0.0
    for row in rows:
        if row.status != "ok" or row.end is None or row.first_token is None:
            sys.exit(f"{case.name}: a request failed: {row.error}")
        assert row.completion_tokens == case.num_tokens, row.completion_tokens
        seconds += row.end - row.first_token
        tokens += row.completion_tokens - 1
    return seconds, seconds / tokens


def body(case: Case, prompt: list[int], salt: str, drafts: bool) -> bytes:
    return json.dumps(
        {
            "model": case.model,
            "prompt": prompt,
            "max_tokens": case.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
            "speculative": case.speculative if drafts else False,
        }
    ).encode()


def counters(url: str) -> dict[str, float]:
    """vLLM's three, from /metrics."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    found = dict.fromkeys(COUNTERS, 0.0)
    for line in text.splitlines():
        for name in COUNTERS:
            if line.startswith(f"vllm:spec_decode_{name}_total{{"):
                found[name] += float(line.rpartition(" ")[2])
    return found


async def run_case(url: str, case: Case, num_pairs: int) -> Found:
    found = Found()
    for drafts in (True, False):
        await block(url, case, -1, drafts)
    before = counters(url)
    for pair in range(num_pairs):
        seconds = {}
        for drafts in (True, False) if pair % 2 else (False, True):
            seconds[drafts], per_token = await block(url, case, pair, drafts)
            if not drafts:
                found.off_seconds_per_token.append(per_token)
        found.ratios.append(seconds[False] / seconds[True])
    found.counters = {name: value - before[name] for name, value in counters(url).items()}
    return found


def server(model: str, model_path: str, flags: Sequence[str]) -> ManagedServer:
    spec = find_spec("poise")
    spec = replace(spec, command=(*spec.command, "--max-model-len", "1024", *flags))
    return ManagedServer(spec, placeholders(spec, model=model, model_path=model_path))


def path_of(model: str) -> str:
    """What `poise serve` is given for a model."""
    if model != BF16_MODEL:
        return model
    made = Path(tempfile.gettempdir()) / f"{BF16_MODEL}.gguf"
    if not made.exists():
        partial = made.with_suffix(".part")
        write_bf16(resolve_model("smollm2-135m"), partial)
        partial.replace(made)
    return str(made)


def run_part(cases: Sequence[Case], num_pairs: int) -> dict[str, Any]:
    """The part's cases, those of one model and its flags in one server."""
    results: dict[str, Any] = {}
    for model, flags in dict.fromkeys((case.model, case.flags) for case in cases):
        with server(model, path_of(model), flags) as running:
            for case in cases:
                if (case.model, case.flags) == (model, flags):
                    found = asyncio.run(run_case(running.url, case, num_pairs)).summary()
                    results[case.name] = {"speculative": case.speculative, **found}
                    low, high = found["interval"]
                    print(
                        f"{case.name}: {found['speedup']:.3f} [{low:.3f}, {high:.3f}], m {found['m']}",
                        flush=True,
                    )
    return results


def predictions() -> dict[str, Any]:
    """How far m and step times came from what was predicted, over texts of both kinds; in this process."""
    with LLM("smollm2-135m", max_model_len=1024) as llm:
        scheduler = llm._engine._scheduler
        controller = DraftLengthController()
        scheduler._drafting.drafter = SpeculativeDrafter(controller)
        for pair in range(12):
            case = PARTS["repeats" if pair % 2 else "random-1"][0]
            params = SamplingParams(
                temperature=0, max_tokens=96, ignore_eos=True, speculative=case.speculative
            )
            given = [{"prompt_token_ids": prompt} for prompt in prompts(case, pair)]
            llm.generate(given * (1 + pair % 3), params)
        errors = sorted(abs(error) for error in scheduler.step_time.errors)
        found = {
            "m_error": controller.forecast.error,
            "steps_with_drafts": controller.forecast.num_requests,
            "step_time_error_median": errors[len(errors) // 2],
            "step_time_error_p90": errors[9 * len(errors) // 10],
            "milliseconds_by_rows": {
                str(rows): 1e3
                * scheduler.step_time.predict(
                    StepShape(rows, 0, scheduler.step_time.keys(150, rows), rows)
                )
                for rows in (1, 2, 3, 5, 9, 17, 33)
            },
        }
    print(found, flush=True)
    return found


def self_times() -> dict[str, Any]:
    """Milliseconds of a plain step, of drafting, and of the step that verifies, at batch 1; break-even follows from them."""
    found: dict[str, Any] = {}
    for model in ("gemma3-270m", BF16_MODEL):
        with LLM(path_of(model), max_model_len=1024, speculative_config=SELF) as llm:
            scheduler: Any = llm._engine._scheduler
            draft_seconds = scheduler._drafting.drafter._controller._draft_seconds
            case = Case(model, "random", 1, SELF)
            for k in (0, 1, 2, 3, 4):
                drafts = {**SELF, "num_speculative_tokens": k, "adaptive": False} if k else False
                params = SamplingParams(
                    temperature=0, max_tokens=64, ignore_eos=True, speculative=drafts
                )
                for pair in range(3):
                    llm.generate([{"prompt_token_ids": prompts(case, pair)[0]}], params)
            times = scheduler.step_time
            rows = [StepShape(n, 0, times.keys(50, n), n) for n in range(1, 6)]
            seconds = [times.predict(shape) for shape in rows]
            found[model] = {
                "target_ms": 1e3 * seconds[0],
                "draft_ms_by_k": {str(k): 1e3 * draft_seconds([k]) for k in (1, 2, 3, 4)},
                "verify_ms_by_k": {str(k): 1e3 * seconds[k] for k in (1, 2, 3, 4)},
            }
    print(found, flush=True)
    return found


MEASURED_INSIDE = {"self-times": self_times, "predictions": predictions}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--into", type=Path, help="an earlier record that the parts join")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    now = datetime.now(UTC)
    record: dict[str, Any] = {
        "created": now.isoformat(timespec="seconds"),
        "poise": poise_version(),
        "cpu": cpu_model(),
        "parts": {},
    }
    if arguments.into is not None:
        record = json.loads(arguments.into.read_text())
    for part in arguments.parts or PARTS:
        cases = [case for case in PARTS[part] if arguments.only in case.name]
        if part in MEASURED_INSIDE:
            found = MEASURED_INSIDE[part]()
        else:
            found = run_part(cases, arguments.pairs)
        record["parts"].setdefault(part, {}).update(found)
    arguments.records.mkdir(parents=True, exist_ok=True)
    path = arguments.into or arguments.records / f"speculation-{now:%Y%m%d-%H%M}.json"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(record, file, indent=1)
    Path(file.name).replace(path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
