"""What the worker pool does when it is not alone: a foreign process takes part of one core, or there are more workers than cores.

    python benchmarks/foreign_load.py smollm2-135m

Decode steps with one worker and with all of them take turns while another process keeps the last core busy for a share of each
10 ms. The pool keeps its promise if all workers together are never slower than one alone, and if twice as many workers as cores
lose no more than a factor of two.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kernels import KernelSteps, Part
from poise.bench.record import write_bytes
from poise.bench.runner import provenance
from poise.machine import allowed_cpus, default_threads
from poise.weights.pull import resolve_model
from records import RECORDS

SCHEMA = "poise.benchmarks.foreign-load/1"
PERIOD = 0.01  # s: the foreign process works for a share of each
SHARES = (0.0, 0.1, 0.3, 1.0)
PARTS = {
    "decode of 1": Part(1, 1, 1, 192),
    "decode of 16": Part(1, 16, 1, 192),
    "decode of 32": Part(1, 32, 1, 192),
    "prompt of 512": Part(1, 1, 512, 512),
}
TOLERANCE = 1.05  # two medians of a noisy machine are not told apart below this


def busy(share: float, cpu: int) -> None:
    """Burns a share of one core until killed."""
    os.sched_setaffinity(0, {cpu})
    while True:
        end = time.perf_counter() + PERIOD * share
        while time.perf_counter() < end:
            pass
        if share < 1:
            time.sleep(PERIOD * (1 - share))


@contextmanager
def foreign_process(share: float) -> Iterator[None]:
    if share == 0:
        yield
        return
    process = multiprocessing.get_context("fork").Process(
        target=busy, args=(share, max(allowed_cpus())), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def medians(runners: dict[int, KernelSteps], part: Part, repeat: int) -> dict[str, float]:
    """Median seconds of a step for each number of workers, which take turns in blocks of eight, of two where a step takes long."""
    step = next(iter(runners.values())).step(part)
    block = 8 if part.rows == 1 else 2
    seconds: dict[int, list[float]] = {threads: [] for threads in runners}
    for _ in range(repeat):
        for threads, kernels in runners.items():
            seconds[threads] += [kernels.run(step) for _ in range(block)]
    return {str(threads): statistics.median(values) for threads, values in seconds.items()}


def main(command_line: Sequence[str] | None = None) -> int:
    """Measures, writes the record, and says whether the promise was kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--output", type=Path, help="default: docs/records/foreign-load-TIME.json")
    arguments = parser.parse_args(command_line)
    now = datetime.now(UTC)
    output = arguments.output or RECORDS / now.strftime("foreign-load-%Y%m%d-%H%M.json")
    cores = default_threads()
    path = resolve_model(arguments.model, offline=True)
    runners = {threads: KernelSteps(path, threads) for threads in sorted({1, cores, 2 * cores})}
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for share in SHARES:
        with foreign_process(share):
            for name, part in PARTS.items():
                seconds = medians(runners, part, arguments.repeat)
                rows.append({"part": name, "foreign_share": share, "median_seconds": seconds})
                shown = ", ".join(f"{t} workers {s * 1e3:.2f} ms" for t, s in seconds.items())
                print(f"{name}, {share:.0%} of a core taken: {shown}", flush=True)
                if seconds[str(cores)] > TOLERANCE * seconds["1"]:
                    broken.append(f"{name}, {share:.0%}: {cores} workers are slower than one")
                if share == 0 and seconds[str(2 * cores)] > 2 * seconds[str(cores)]:
                    broken.append(
                        f"{name}: {2 * cores} workers on {cores} cores lose more than 2 x"
                    )
    record = {
        "schema": SCHEMA,
        "created": now.isoformat(timespec="seconds"),
        "model": arguments.model,
        "provenance": provenance(),
        "rows": rows,
        "broken": broken,
    }
    write_bytes(output, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    print(f"record: {output}")
    for line in broken:
        print(f"foreign load: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
