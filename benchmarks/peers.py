"""The six reference workloads against poise and its peers, in turn, on this machine: one record for docs/BENCHMARKS.md.

    python benchmarks/peers.py poise llama.cpp openvino --repeat 3

Servers are started as `poise bench compare` starts them (see `poise bench servers`), all stay up, and each repetition of a workload sends
the same requests to every one of them, the order turned round from one repetition to the next. A run that failed a gate stays in the
record with its reasons and is left out of the figures. Only ratios within one record mean anything: machines are noisy.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from poise.bench.client import Target
from poise.bench.contestants import Contestant, contestant
from poise.bench.paired_runs import values
from poise.bench.record import RunRecord, write_bytes, write_run
from poise.bench.runner import RunSettings, provenance, run_schedule
from poise.bench.workloads import OPEN_PRESET, OPEN_PRESET_SLOS, PRESET_NAMES, preset_schedule
from poise.errors import PoiseError
from poise.weights.pull import resolve_model
from records import RECORDS

SCHEMA = "poise.benchmarks.peers/1"


class PeerRun(msgspec.Struct):
    """One workload on one server once. `values` is every figure of its full window."""

    server: str
    workload: str
    repetition: int
    seed: int
    schedule_sha256: str
    valid: bool
    reasons: list[str]
    values: dict[str, float | None]


class PeersRecord(msgspec.Struct):
    """A whole session of runs; `servers` says how each was started."""

    created: str
    model: str
    seed: int
    rate: float
    seconds: float
    provenance: dict[str, Any]
    servers: dict[str, dict[str, Any]]
    runs: list[PeerRun] = []
    stopped: str | None = None
    schema: str = SCHEMA


def server(text: str, arguments: argparse.Namespace) -> Contestant:
    """The server meant by NAME, or by NAME@FILE where it shall read a file of its own under the same model name."""
    name, _, path = text.partition("@")

    def model_path(model: str) -> str:
        return path or str(resolve_model(model, offline=True))

    found = contestant(
        name, model=arguments.model, threads=arguments.threads, model_path=model_path
    )
    if path:
        found.name = f"{found.name} {Path(path).stem.rsplit('.')[-1]}"
    return found


def measure(
    contestants: list[Contestant], arguments: argparse.Namespace, record: PeersRecord
) -> None:
    """Starts every server, then sends them each repetition in turn."""
    with ExitStack() as stack:
        targets = [stack.enter_context(each.running()) for each in contestants]
        record.servers = {each.name: each.facts for each in contestants}
        for workload in arguments.workload:
            for repetition in range(arguments.repeat):
                turn = repetition % len(targets)
                order = targets[turn:] + targets[:turn]
                for target in order if repetition % 2 == 0 else reversed(order):
                    record.runs.append(one(target, workload, repetition, arguments))


def one(target: Target, workload: str, repetition: int, arguments: argparse.Namespace) -> PeerRun:
    """Runs a workload once, says its figure, and keeps the rows if they are wanted."""
    seed = arguments.seed + repetition
    schedule = preset_schedule(workload, seed, rate=arguments.rate, seconds=arguments.seconds)
    slos = OPEN_PRESET_SLOS if workload == OPEN_PRESET else {}
    settings = RunSettings(goodput_slos=slos)
    run, rows = uvloop.run(run_schedule(schedule, target, settings))
    if arguments.rows:
        write_run(run, rows, arguments.rows / f"{workload}-{target.name}-{repetition}.json")
    kept = PeerRun(
        target.name,
        workload,
        repetition,
        seed,
        schedule.sha256,
        run.valid,
        reasons(run),
        values(run),
    )
    shown = ", ".join(
        f"{name} {kept.values[name]:.4g}"
        for name in ("output_throughput", "prompt_throughput", "ttft_p50", "goodput_share")
        if kept.values.get(name) is not None
    )
    print(f"{workload} {target.name}: {shown} {'; '.join(kept.reasons)}", flush=True)
    if run.stopped:
        raise PoiseError(f"{workload} on {target.name}: {run.stopped}")
    return kept


def reasons(run: RunRecord) -> list[str]:
    """Why a run can't be believed."""
    return [f"{gate.name}: {gate.reason}" for gate in run.failed_gates]


def main() -> int:
    """Runs, and writes the record whatever happens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "server",
        nargs="+",
        help="poise, llama.cpp, openvino, vllm, a TOML file or an address; NAME@FILE reads another file of the model",
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, help="default: physical cores")
    parser.add_argument("--workload", nargs="+", default=list(PRESET_NAMES), choices=PRESET_NAMES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--rate", type=float, default=1.0, help="W6: requests per second")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="W6: length of the arrival window"
    )
    parser.add_argument(
        "--rows", type=Path, metavar="FOLDER", help="keep each run's record and rows there"
    )
    parser.add_argument("--output", type=Path, help="default: docs/records/peers-TIME.json")
    arguments = parser.parse_args()
    now = datetime.now(UTC)
    output = arguments.output or RECORDS / now.strftime("peers-%Y%m%d-%H%M.json")
    record = PeersRecord(
        now.isoformat(timespec="seconds"),
        arguments.model,
        arguments.seed,
        arguments.rate,
        arguments.seconds,
        provenance(),
        {},
    )
    try:
        contestants = [server(text, arguments) for text in arguments.server]
        measure(contestants, arguments, record)
    except PoiseError as error:
        record.stopped = str(error)
        print(getattr(error, "log_tail", ""), file=sys.stderr)
    except KeyboardInterrupt:
        record.stopped = "interrupted"
    if record.runs:
        write_bytes(output, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        print(f"record: {output}")
    if record.stopped:
        print(f"peers: {record.stopped}", file=sys.stderr)
    return 1 if record.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
