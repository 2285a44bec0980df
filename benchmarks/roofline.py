"""How fast this machine reads and multiplies, and how close a decode step of one sequence comes to reading at that rate.

    python benchmarks/roofline.py smollm2-135m

Reads: a working set of the model's size by 1 worker and by all of them, in pages of 4 KiB and huge ones, with and without software
prefetch; products: int8, bf16 and f32 on registers. Each try takes turns with the step under test, so that both see the same
machine. A step that beats the probe shows that the probe is wrong: the record is then invalid, and the exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kernels import KernelSteps, Part, too_fast_a_probe
from poise.bench.record import write_bytes
from poise.bench.runner import provenance
from poise.kernels.cpu.rates import MachineRates, RateProbe
from poise.kernels.cpu.recorded import Rows, WorkCounter
from poise.machine import default_threads
from poise.weights.pull import resolve_model
from records import RECORDS

SCHEMA = "poise.benchmarks.roofline/1"
DECODE = Part(1, 1, 1, 192)


def table(rates: MachineRates) -> list[str]:
    """The probe's findings as lines, the fastest way to read first."""
    lines = [f"reading {rates.working_set_bytes / 2**20:.0f} MiB, GB/s:"]
    for read in sorted(rates.reads, key=lambda one: -one.bytes_per_second):
        pages = "huge pages" if read.huge_pages else "4 KiB pages"
        ahead = f"prefetch {read.prefetch_bytes} B ahead" if read.prefetch_bytes else "no prefetch"
        lines.append(
            f"  {read.bytes_per_second / 1e9:6.1f}  {read.threads} worker(s), {pages}, {ahead}"
        )
    lines.append(f"products on registers, {rates.threads} worker(s), {rates.isa}:")
    lines += [f"  {rate / 1e9:6.1f} GOPS {kind}" for kind, rate in rates.products.items()]
    return lines


def main(command_line: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--repeat", type=int, default=30, help="turns of probe and step")
    parser.add_argument("--output", type=Path, help="default: docs/records/roofline-TIME.json")
    arguments = parser.parse_args(command_line)
    now = datetime.now(UTC)
    output = arguments.output or RECORDS / now.strftime("roofline-%Y%m%d-%H%M.json")
    kernels = KernelSteps(resolve_model(arguments.model, offline=True), arguments.threads)
    step = kernels.step(DECODE)
    counter = WorkCounter(kernels.backend.operations)
    counter.add(Rows.of(step))
    needed = sum(work.read_bytes for work in counter.by_operation())
    probe = RateProbe(kernels.backend.arena.used_bytes, arguments.threads)
    kernels.run(step)
    seconds: list[float] = []
    for _ in range(arguments.repeat):
        probe.measure()
        seconds.append(kernels.run(step))
    rates = probe.rates()
    best = min(seconds)
    share = needed / best / rates.read.bytes_per_second
    fault = too_fast_a_probe(rates.products)
    if share > 1:
        fault = "the step beats the probe; the probe is wrong"
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "created": now.isoformat(timespec="seconds"),
        "model": arguments.model,
        "provenance": provenance(),
        "machine": rates.as_dict(),
        "decode": {
            "step": str(DECODE),
            "read_bytes": needed,
            "seconds": best,
            "median_seconds": sorted(seconds)[len(seconds) // 2],
            "share_of_reading": share,
        },
        "valid": fault is None,
    }
    write_bytes(output, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    print("\n".join(table(rates)))
    print(
        f"decode of one sequence: {best * 1e3:.2f} ms for {needed / 1e6:.1f} MB, {needed / best / 1e9:.1f} GB/s, "
        f"{share:.0%} of the fastest reading"
    )
    print(f"record: {output}")
    if fault:
        print(f"roofline: {fault}", file=sys.stderr)
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
