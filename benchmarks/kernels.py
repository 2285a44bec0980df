"""Every operation at the shapes of the reference workloads beside the machine's own limits, and each workload beside the sum of its parts.

    python benchmarks/kernels.py smollm2-135m

For each workload: the steps that it is made of are run on the kernels alone (no scheduler, no HTTP), the machine's rates are probed
between them, and then the workload goes over HTTP to a server that poise starts, all within the same minute or two. Share = what came
over HTTP ÷ what the steps alone would give. A kernel that beats the probe shows that the probe is wrong: the record is then invalid.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import msgspec
import numpy as np
import uvloop

from poise.bench.client import Target
from poise.bench.contestants import contestant
from poise.bench.paired_runs import values
from poise.bench.record import write_bytes
from poise.bench.runner import RunSettings, provenance, run_schedule
from poise.bench.workloads import preset_schedule
from poise.core.output import EngineSampling
from poise.core.sampling_params import SamplingParams
from poise.errors import PoiseError
from poise.kernels.cpu.backend import CPUBackend
from poise.kernels.cpu.rates import MachineRates, RateProbe
from poise.kernels.cpu.recorded import Rows, WorkCounter
from poise.kernels.ops import KVShape, Step
from poise.machine import default_threads
from poise.models.families import family
from poise.models.weights import Source
from poise.sampling.rows import RESULT_TYPE, SamplingRows, SamplingState
from poise.weights.open_checkpoint import open_checkpoint
from poise.weights.pull import resolve_model
from records import RECORDS

SCHEMA = "poise.benchmarks.kernels/1"
CHUNK = 512  # rows of a step, as `poise serve` has it
BLOCK = 16
MAX_SEQUENCES = 32
SETTLING_SECONDS = 5  # an idle server has memory found for its pages at first
MAX_CONTEXT = 2304


@dataclass(frozen=True, slots=True)
class Part:
    """`count` steps of `sequences` sequences, each with `rows` new rows that end at position `context`; their first
    `shared` tokens are on the same blocks.
    """

    count: float
    sequences: int
    rows: int
    context: int
    draws: bool = True
    shared: int = 0

    def __str__(self) -> str:
        behind = f" behind {self.shared:,} shared" if self.shared else ""
        return f"{self.sequences} x {self.rows} rows at {self.context:,}{behind}"


# What a workload's steps would be if prompts filled whole chunks and every request decoded at once; contexts are those in the middle.
WORKLOADS: dict[str, tuple[str, int, tuple[Part, ...]]] = {
    "W1": ("output_throughput", 128, (Part(1, 1, 128, 128), Part(127, 1, 1, 192))),
    "W2": (
        "prompt_throughput",
        2048,
        tuple(Part(1, 1, CHUNK, end, end == 2048) for end in range(CHUNK, 2049, CHUNK)),
    ),
    "W3": ("output_throughput", 32 * 128, (Part(16, 2, 256, 256), Part(127, 32, 1, 320))),
    "W4": (
        "output_throughput",
        32 * 64,
        (
            Part(1, 1, CHUNK, CHUNK, False),
            Part(1, 1, CHUNK, 2 * CHUNK, False),
            Part(4, 8, 64, 1088, shared=1024),
            Part(2 * 63, 16, 1, 1120, shared=1024),
        ),
    ),
    "W5": ("output_throughput", 32 * 256, (Part(1, 32, 16, 16), Part(255, 32, 1, 144))),
}


class KernelSteps:
    """A model recorded on the CPU backend, and steps of given shapes run on it."""

    def __init__(self, path: Path, threads: int) -> None:
        checkpoint = open_checkpoint(path)
        config = checkpoint.config
        blocks = MAX_SEQUENCES * -(-MAX_CONTEXT // BLOCK)
        shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK, blocks)
        self.backend = CPUBackend(shape, max_rows=CHUNK, threads=threads)
        family(config.architecture)(self.backend, config, Source(self.backend, checkpoint))
        # Pages that were never written are all one page of zeros, which stays in the nearest cache.
        for block in range(blocks):
            self.backend.pages.fill(block, 0)
        self.vocab_size = config.vocab_size
        sampling = EngineSampling(SamplingParams(temperature=0), 0, 0, frozenset())
        self._greedy = SamplingState(sampling, config.vocab_size, 1)

    def step(self, part: Part) -> Step:
        """Rows of random tokens; the KV before them is whatever earlier steps left: time does not depend on its values. A
        sequence's blocks lie apart, as they do where sequences grow at the same time.
        """
        source = np.random.default_rng(part.context)
        blocks = -(-part.context // BLOCK)
        ids = np.arange(part.sequences * blocks, dtype=np.int32)
        tables = np.ascontiguousarray(ids.reshape(blocks, part.sequences).T)
        tables[:, : part.shared // BLOCK] = tables[0, : part.shared // BLOCK]
        positions = np.arange(part.context - part.rows, part.context, dtype=np.int32)
        starts = np.arange(0, part.sequences * part.rows + 1, part.rows, dtype=np.int32)
        return Step(
            token_ids=source.integers(0, self.vocab_size, part.sequences * part.rows, np.int32),
            positions=np.tile(positions, part.sequences),
            query_start=starts,
            block_tables=tables,
            logit_rows=starts[1:] - 1 if part.draws else starts[:0],
        )

    def run(self, step: Step) -> float:
        """Seconds of one step that draws greedily."""
        count = len(step.logit_rows)
        rows = SamplingRows(max(1, count))
        results = np.zeros(max(1, count), RESULT_TYPE)
        for i in range(count):
            self._greedy.fill(rows, i, step.token_ids, 1)
        begin = perf_counter()
        self.backend.run(step, rows.records.view(np.uint8), results.view(np.uint8))
        return perf_counter() - begin


def measure_part(kernels: KernelSteps, part: Part, probe: RateProbe, repeat: int) -> dict[str, Any]:
    """The best and the median of a part's steps, and its operations in the best one; the probe takes turns with them."""
    step = kernels.step(part)
    plan = kernels.backend.plan
    seconds: list[float] = []
    best: list[int] = []
    plan.profiling = True
    for _ in range(repeat):
        seconds.append(kernels.run(step))
        if seconds[-1] == min(seconds):
            best = plan.operation_times
        probe.measure()
    plan.profiling = False
    counter = WorkCounter(kernels.backend.operations)
    counter.add(Rows.of(step), kernels.backend.spared_keys)
    by_name: dict[str, dict[str, float]] = {}
    for operation, work, begin, end in zip(
        kernels.backend.operations, counter.by_operation(), best, best[1:]
    ):
        sums = by_name.setdefault(operation.name, {"seconds": 0.0, "read_bytes": 0, "flops": 0})
        sums["seconds"] += (end - begin) / 1e9
        sums["read_bytes"] += work.read_bytes
        sums["flops"] += work.flops
    return {
        "part": str(part),
        "count": part.count,
        "seconds": min(seconds),
        "median_seconds": sorted(seconds)[len(seconds) // 2],
        "operations": by_name,
    }


def shares(part: dict[str, Any], rates: MachineRates) -> Iterator[tuple[str, dict[str, float]]]:
    """By operation, the share of the machine's rate that it reached: reading, and int8 products."""
    for name, sums in part["operations"].items():
        if sums["seconds"] > 0:
            yield (
                name,
                {
                    "read": sums["read_bytes"] / sums["seconds"] / rates.read.bytes_per_second,
                    "int8": sums["flops"] / sums["seconds"] / rates.products["int8"],
                },
            )


def over_http(target: Target, workload: str, seed: int) -> tuple[float | None, list[str]]:
    """The workload's figure through `poise bench`, and why it can't be believed."""
    schedule = preset_schedule(workload, seed, rate=1.0, seconds=1.0)
    run, _ = uvloop.run(run_schedule(schedule, target, RunSettings(goodput_slos={})))
    return values(run)[WORKLOADS[workload][0]], [gate.reason for gate in run.failed_gates]


def measure(arguments: argparse.Namespace, record: dict[str, Any]) -> None:
    """Fills the record workload by workload."""
    path = resolve_model(arguments.model, offline=True)
    kernels = KernelSteps(path, arguments.threads)
    server = contestant(
        "poise",
        model=arguments.model,
        threads=arguments.threads,
        model_path=lambda name: str(resolve_model(name, offline=True)),
    )
    with server.running() as target:
        sleep(SETTLING_SECONDS)
        for workload in arguments.workload:
            _, tokens, parts = WORKLOADS[workload]
            probe = RateProbe(kernels.backend.arena.used_bytes, arguments.threads)
            measured = [measure_part(kernels, part, probe, arguments.repeat) for part in parts]
            rates = probe.rates()
            for part in measured:
                part["shares"] = dict(shares(part, rates))
            figures = [
                over_http(target, workload, arguments.seed + i) for i in range(arguments.runs)
            ]
            believed = sorted(
                figure for figure, reasons in figures if figure is not None and not reasons
            )
            seconds = sum(part["count"] * part["seconds"] for part in measured)
            record["workloads"][workload] = {
                "parts": measured,
                "sum_of_parts_tokens_per_second": tokens / seconds,
                "over_http_tokens_per_second": believed[len(believed) // 2] if believed else None,
                "refused": [reason for _, reasons in figures for reason in reasons],
                "machine": rates.as_dict(),
            }
            show(workload, record["workloads"][workload])


def too_fast_a_probe(products: dict[str, float]) -> str | None:
    """Why the rates of products can't be the machine's, if so: the probe's products were not all computed."""
    ratio = products["int8"] / products["f32"]
    if ratio <= MOST_INT8_PER_F32:
        return None
    return f"the probe's int8 rate is {ratio:.1f} times its f32 rate, which no vector unit does"


def faults(record: dict[str, Any]) -> list[str]:
    """What makes the record invalid: an operation that is faster than the machine's probes, a probe that is faster than the
    machine, or a workload without a figure.
    """
    found = []
    for name, workload in record["workloads"].items():
        if workload["over_http_tokens_per_second"] is None:
            found.append(f"{name}: no run over HTTP can be believed")
        if too_fast := too_fast_a_probe(workload["machine"]["products"]):
            found.append(f"{name}: {too_fast}")
        for part in workload["parts"]:
            for operation, share in part["shares"].items():
                if (operation in WHOLE_WEIGHTS and share["read"] > 1) or share["int8"] > 1:
                    found.append(f"{name}, {part['part']}: {operation} beats the probe")
    return found


# vpdpbusd and vpmaddubsw do 4 times the operations of an fma, on as many units at most.
MOST_INT8_PER_F32 = 5
WHOLE_WEIGHTS = (
    "norm_linear",
    "linear_residual",
    "gated_mlp",
    "logits",
)  # too large for the caches together


def show(name: str, workload: dict[str, Any]) -> None:
    alone, served = (
        workload["sum_of_parts_tokens_per_second"],
        workload["over_http_tokens_per_second"],
    )
    share = "" if served is None else f", share {served / alone:.0%}"
    print(
        f"{name}: sum of parts {alone:.1f} tok/s, over HTTP {served and round(served, 1)} tok/s{share}"
    )
    for part in workload["parts"]:
        operations = ", ".join(
            f"{operation} {part['operations'][operation]['seconds'] * 1e3:.2f} ms ({s['read']:.0%} read, {s['int8']:.0%} int8)"
            for operation, s in part["shares"].items()
            if part["operations"][operation]["seconds"] > 0.02 * part["seconds"]
        )
        print(
            f"    {part['count']:g} x {part['part']}: {part['seconds'] * 1e3:.2f} ms: {operations}",
            flush=True,
        )


def main(command_line: Sequence[str] | None = None) -> int:
    """Measures, and writes the record whatever happens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=5, help="steps of each part")
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload over HTTP")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--output", type=Path, help="default: docs/records/kernels-TIME.json")
    arguments = parser.parse_args(command_line)
    now = datetime.now(UTC)
    output = arguments.output or RECORDS / now.strftime("kernels-%Y%m%d-%H%M.json")
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "created": now.isoformat(timespec="seconds"),
        "model": arguments.model,
        "threads": arguments.threads,
        "seed": arguments.seed,
        "provenance": provenance(),
        "workloads": {},
    }
    try:
        measure(arguments, record)
    except PoiseError as error:
        record["stopped"] = str(error)
    record["faults"] = faults(record)
    write_bytes(output, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    print(f"record: {output}")
    for fault in [*record["faults"], *([record["stopped"]] if "stopped" in record else [])]:
        print(f"kernels: {fault}", file=sys.stderr)
    return 1 if record["faults"] or "stopped" in record else 0


if __name__ == "__main__":
    sys.exit(main())
