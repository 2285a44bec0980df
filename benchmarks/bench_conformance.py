"""Is the load generator right, and does it keep up? A run of it against the mock's known schedules, kept as a record.

    python benchmarks/bench_conformance.py [--repeat 3] [--rate 1000] [--seconds 10] [--no-record]

Accuracy: every mean and percentile of TTFT, token intervals, chunk gaps, TPOT and end-to-end, and the throughputs, within 1 ms or
1 % of what the mock really did, by the median difference over --repeat runs (a wrong definition is wrong in all of them, a noisy
machine is not). Load: at --rate requests a second, the 99th percentile of the dispatch lag under 5 ms. Run it on an idle machine;
`chrt -f 10` keeps neighbours out of the accuracy part, but under load Linux stops real-time processes for 50 ms in each second
that they fill. The record says which scheduling it was. During the accuracy part each CPU runs a process of idle priority: a virtual
CPU that has nothing to do is put to sleep, and takes a millisecond to wake up. Exit status 1 where a figure is off.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec
import uvloop

from poise.bench.arrivals import Arrivals, ClosedLoop, OpenArrivals
from poise.bench.client import Target
from poise.bench.conformance import Comparison, compare_run
from poise.bench.lengths import Constant
from poise.bench.mock_server import Served
from poise.bench.record import ClientOptions, RunRecord, write_bytes
from poise.bench.runner import RunSettings, provenance, run_schedule
from poise.bench.workloads import Kind, RandomTokens, draw_schedule
from records import RECORDS

SCHEMA = "poise.benchmarks.conformance/1"
MOCK = "from poise.cli.main import main; main()"
LAG_LIMIT_S = 0.005
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
ACCURACY: tuple[tuple[str, Kind], ...] = (
    ("steady", "completions"),
    ("stutter", "completions"),
    ("continuous-usage", "completions"),
    ("split", "completions"),
    ("crlf", "completions"),
    ("joined", "completions"),
    ("heartbeats", "completions"),
    ("empty-first", "completions"),
    ("role-first", "chat"),
    ("reasoning-first", "chat"),
)


@contextmanager
def mock(profile: str) -> Iterator[str]:
    """The address of a mock in a process of its own."""
    command = [sys.executable, "-c", MOCK, "bench", "mock", "--port", "0", "--profile", profile]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    separate(process.pid)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.stdout.readline().split()[1].removesuffix("/v1;")
    finally:
        process.terminate()
        process.communicate()


def separate(mock_pid: int) -> None:
    """The client on one CPU and the mock on another, so that neither waits for the other."""
    if len(CPUS) > 1:
        os.sched_setaffinity(mock_pid, {CPUS[1]})
        os.sched_setaffinity(0, {CPUS[0]})


@contextmanager
def awake() -> Iterator[None]:
    """Keeps every CPU from going to sleep; whatever else wants to run comes first."""
    children = []
    for cpu in CPUS:
        child = os.fork()
        if child == 0:
            os.sched_setaffinity(0, {cpu})
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            while os.getppid() != 1:
                pass
            os._exit(0)
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def measure(
    profile: str, kind: Kind, arrivals: Arrivals, num_requests: int, output: int, reuse: bool
) -> tuple[RunRecord, list[Comparison]]:
    """One run against a fresh mock, and each of its figures beside the mock's."""
    workload = RandomTokens(Constant(64), Constant(output))
    schedule = draw_schedule(workload, arrivals, 1, kind, num_requests=num_requests)
    endpoint = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    settings = RunSettings(client=ClientOptions(reuse_connections=reuse))
    with mock(profile) as url:
        record, _ = uvloop.run(run_schedule(schedule, Target(url, endpoint, "mock"), settings))
        with urllib.request.urlopen(url + "/mock/served") as answer:
            served = msgspec.json.decode(answer.read(), type=list[Served])
    return record, compare_run(record, served[len(schedule.warmups) :])


def accuracy(repeat: int, reuse: bool) -> Iterator[dict[str, Any]]:
    for profile, kind in ACCURACY:
        runs = [measure(profile, kind, ClosedLoop(1), 16, 8, reuse)[1] for _ in range(repeat)]
        figures = [middle(same) for same in zip(*runs, strict=True)]
        off = [item for item in figures if not item.agrees]
        print(f"{profile:<18} {len(figures) - len(off)} of {len(figures)} figures agree")
        for item in off:
            print(f"  {item.figure}: {item.reported}, the mock's {item.expected} {item.unit}")
        yield {
            "profile": profile,
            "kind": kind,
            "reuse_connections": reuse,
            "figures": [asdict(item) for item in figures],
            "differences": {
                same[0].figure: [one.difference for one in same] for same in zip(*runs)
            },
            "num_off": len(off),
        }


def middle(same: Sequence[Comparison]) -> Comparison:
    """Of one figure's comparisons, the one with the median difference; one without a value comes first."""
    ordered = sorted(same, key=lambda one: -math.inf if one.difference is None else one.difference)
    return ordered[len(ordered) // 2]


def load(rate: float, seconds: float, reuse: bool) -> Iterator[dict[str, Any]]:
    for arrivals in (OpenArrivals(rate, math.inf), OpenArrivals(rate)):
        record, comparisons = measure(
            "instant", "completions", arrivals, int(rate * seconds), 4, reuse
        )
        lag = record.summary["full"].distributions["dispatch_lag"]
        p99 = lag.percentile(99.0)
        assert p99 is not None
        kept_up = p99.value is not None and p99.value < LAG_LIMIT_S and record.valid
        sent = next(gate for gate in record.gates if gate.name == "achieved rate")
        print(
            f"{arrivals.process:<18} {sent.reason}; dispatch lag p99 "
            f"{(p99.value or math.nan) * 1e3:.2f} ms, worst {(lag.maximum or math.nan) * 1e3:.2f} ms"
        )
        for gate in record.failed_gates:
            print(f"  {gate.name}: {gate.reason}")
        yield {
            "arrivals": arrivals.describe(),
            "reuse_connections": reuse,
            "dispatch_lag": asdict(lag),
            "comparisons": [asdict(item) for item in comparisons[:3]],
            "gates": [asdict(gate) for gate in record.gates],
            "num_off": int(not kept_up),
        }


def commit() -> str:
    """The checkout's commit, with "+" where files differ from it; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RECORDS.parent)
    return done.stdout.strip() or "unknown"


def scheduling() -> str:
    """The policy that this process and the mock run under."""
    if not hasattr(os, "sched_getscheduler"):
        return "unknown"
    names = {os.SCHED_OTHER: "SCHED_OTHER", os.SCHED_FIFO: "SCHED_FIFO", os.SCHED_RR: "SCHED_RR"}
    return names.get(os.sched_getscheduler(0), "another")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each profile")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--reuse-connections", action="store_true", help="as the client's option")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    now = datetime.now(UTC)
    facts = provenance()
    reuse = arguments.reuse_connections
    with awake():
        accurate = list(accuracy(arguments.repeat, reuse))
    parts = {
        "accuracy": accurate,
        "load": list(load(arguments.rate, arguments.seconds, reuse)),
    }
    agrees = not any(one["num_off"] for part in parts.values() for one in part)
    found = {
        "schema": SCHEMA,
        "created": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "command": ["python", "benchmarks/bench_conformance.py", *sys.argv[1:]],
        "provenance": facts,
        "scheduling": scheduling(),
        "agrees": agrees,
        **parts,
    }
    if not arguments.no_record:
        path = RECORDS / f"conformance-{now:%Y-%m-%d}-{commit().rstrip('+')}.json"
        write_bytes(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        print(f"wrote {path}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
