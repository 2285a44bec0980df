"""What the engine's Python costs per step of one request, by what the processor did in between.

    python benchmarks/cold_python.py

The same steps are run with the native call as it is, with one that computes for 5 ms and touches no memory to speak of, with one
that sleeps as long, and with none at all: the last shows what the instructions cost, the second what it costs that something else
ran before them, whatever poise's kernels do to the caches. No HTTP.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any

from poise.config import CacheConfig, ComputeConfig, ModelSource, SchedulerConfig
from poise.core.sampling_params import SamplingParams
from poise.engine.build import build_engine
from poise.engine.client import EngineRequest
from poise.engine.llm_engine import LLMEngine
from poise.kernels.cpu.backend import CPUBackend
from records import write_record

PROMPT_TOKENS = 128
PAUSE = 0.005  # s
NUM_REAL = 2  # steps at first: the prompt, and one whose results stand for all later ones
_RUN = CPUBackend.run


def iterations_of(seconds: float) -> int:
    """So many rounds of a hash take that long."""
    num_tried = 10_000
    begin = monotonic_ns()
    compute(num_tried)
    return round(num_tried * seconds * 1e9 / (monotonic_ns() - begin))


def compute(iterations: int) -> None:
    """Works in some hundred bytes, without the GIL."""
    hashlib.pbkdf2_hmac("sha256", b"poise", b"poise", iterations)


def measure(
    engine: LLMEngine, key: int, num_steps: int, instead: Callable[[], None] | None
) -> float:
    """Median microseconds of Python in a step of decoding. With `instead`, only the first steps are real."""
    native = num_run = 0

    def timed(*arguments: Any, **named: Any) -> None:
        nonlocal native
        begin = monotonic_ns()
        if instead is None or num_run < NUM_REAL:
            _RUN(*arguments, **named)
        else:
            instead()
        native = monotonic_ns() - begin

    params = SamplingParams(temperature=0.0, max_tokens=num_steps + NUM_REAL, ignore_eos=True)
    engine.add_request(key, EngineRequest(f"{key}", tuple(range(PROMPT_TOKENS)), params, 0))
    taken: list[int] = []
    CPUBackend.run = timed  # type: ignore[method-assign]
    try:
        while engine.has_unfinished_requests():
            begin = monotonic_ns()
            engine.step()
            taken.append(monotonic_ns() - begin - native)
            num_run += 1
    finally:
        CPUBackend.run = _RUN  # type: ignore[method-assign]
    return statistics.median(taken[NUM_REAL:]) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path, help="default: docs/records/cold-python-TIME.json")
    options = parser.parse_args()
    engine = build_engine(
        ModelSource(options.model),
        CacheConfig(enable_prefix_caching=False),
        SchedulerConfig(),
        ComputeConfig(),
    )
    iterations = iterations_of(PAUSE)
    cases: dict[str, Callable[[], None] | None] = {
        "a real step": None,
        "computing": lambda: compute(iterations),
        "sleeping": lambda: time.sleep(PAUSE),
        "nothing": lambda: None,
    }
    measure(engine, 0, options.steps, None)
    runs: list[dict[str, Any]] = []
    for repetition in range(options.repeat):
        for case, instead in cases.items():
            microseconds = measure(engine, len(runs) + 1, options.steps, instead)
            runs.append({"repetition": repetition, "in_between": case, "python_us": microseconds})
    engine.close()
    for case in cases:
        chosen = [r["python_us"] for r in runs if r["in_between"] == case]
        print(
            f"{case}: {statistics.median(chosen):.0f} µs of Python per step"
            f" ({min(chosen):.0f} … {max(chosen):.0f})"
        )
    target = write_record(
        "cold-python",
        {"model": options.model, "steps": options.steps, "runs": runs},
        options.output,
    )
    print(f"record: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
