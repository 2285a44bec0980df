"""Two builds of poise against each other: the same steps on the kernels alone, in turn.

    python benchmarks/steps_in_turn.py OLD_ENVIRONMENT/bin/python NEW_ENVIRONMENT/bin/python

Each build runs in a process of its own with its own model, and waits while the other one runs; a turn takes less than a second, so that a
machine whose rates drift disturbs both alike. Reported is new ÷ old of each round's median step: the median of the rounds, and
their first and ninth tenth. The same interpreter twice is the control: its interval must hold 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec

from kernels import CHUNK, KernelSteps, Part
from poise.bench.record import write_bytes
from poise.bench.runner import provenance
from poise.machine import default_threads
from poise.weights.pull import resolve_model
from records import RECORDS

SCHEMA = "poise.benchmarks.steps-in-turn/1"
STEPS = 8  # of a turn; of a prompt's chunk, which takes long, 2
PARTS = (
    *(Part(1, sequences, 1, 144) for sequences in (1, 2, 4, 8, 16, 32)),
    Part(1, 32, 1, 320),
    Part(1, 1, 128, 128),
    Part(1, 2, 256, 256),
    Part(1, 1, CHUNK, CHUNK, draws=False),
    Part(1, 1, CHUNK, 4 * CHUNK, draws=False),
)


def serve_turns(model: str, threads: int) -> None:
    """One build: for each line "index count" on standard input, so many steps of a part, their seconds as JSON."""
    kernels = KernelSteps(resolve_model(model), threads)
    steps = [kernels.step(part) for part in PARTS]
    print("ready", flush=True)
    for line in sys.stdin:
        index, count = map(int, line.split())
        kernels.run(steps[index])  # the other build's turn has emptied the caches
        print(json.dumps([kernels.run(steps[index]) for _ in range(count)]), flush=True)


class Build:
    """A process that runs steps when asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def turn(self, index: int, count: int) -> float:
        """Median seconds of `count` steps of PARTS[index]."""
        assert self._process.stdin is not None
        print(index, count, file=self._process.stdin, flush=True)
        return median(json.loads(self.line()))

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._process.args} ended with {self._process.wait()}")
        return line


@contextmanager
def started(python: str, arguments: argparse.Namespace) -> Iterator[Build]:
    """A build that is ready, ended behind the block."""
    command = [python, __file__, "--serve", "--model", arguments.model]
    command += ["--threads", str(arguments.threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        build = Build(process)
        build.line()
        yield build
    finally:
        process.kill()
        process.wait()


def compare(builds: Sequence[Build], index: int, rounds: int) -> dict[str, Any]:
    """One part: who goes first changes from round to round."""
    count = STEPS if PARTS[index].rows == 1 else 2
    seconds: tuple[list[float], list[float]] = ([], [])
    for repetition in range(rounds):
        for which in (0, 1) if repetition % 2 == 0 else (1, 0):
            seconds[which].append(builds[which].turn(index, count))
    ratios = [new / old for old, new in zip(*seconds, strict=True)]
    tenths = quantiles(ratios, n=10)
    return {
        "part": str(PARTS[index]),
        "ratio": median(ratios),
        "first_tenth": tenths[0],
        "ninth_tenth": tenths[-1],
        "old_seconds": seconds[0],
        "new_seconds": seconds[1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("python", nargs="*", help="interpreters of the old and of the new build")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, help="default: docs/records/steps-in-turn-TIME.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_turns(arguments.model, arguments.threads)
        return 0
    if len(arguments.python) != 2 or arguments.rounds < 2:
        parser.error("two interpreters and at least two rounds are needed")
    old, new = arguments.python
    now = datetime.now(UTC)
    parts = []
    with started(old, arguments) as first, started(new, arguments) as second:
        for index in range(len(PARTS)):
            part = compare((first, second), index, arguments.rounds)
            parts.append(part)
            print(
                f"{part['part']}: new / old {part['ratio']:.3f} ({part['first_tenth']:.3f} to {part['ninth_tenth']:.3f})",
                flush=True,
            )
    record = {
        "schema": SCHEMA,
        "created": now.isoformat(timespec="seconds"),
        "model": arguments.model,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "provenance": provenance(),
        "parts": parts,
    }
    output = arguments.output or RECORDS / now.strftime("steps-in-turn-%Y%m%d-%H%M.json")
    write_bytes(output, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    print(f"record: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
