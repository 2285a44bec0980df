"""`poise bench mock` as a process, and a run of the load generator against it: who, how many and what, never how fast."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from poise.bench.arrivals import Arrivals, ClosedLoop, OpenArrivals
from poise.bench.client import Target
from poise.bench.conformance import MOCK_METRICS, compare_run, pair, token_events
from poise.bench.lengths import Constant
from poise.bench.mock_server import Served
from poise.bench.record import RequestRow, RunRecord
from poise.bench.runner import RunSettings, run_schedule
from poise.bench.workloads import RandomTokens, draw_schedule

POISE = [sys.executable, "-c", "from poise.cli.main import main; main()"]
LABELLED = """
description = "chunks of one and three tokens, each answer with a text of its own"
[[schedules]]
first_token_s = 0.02
gap_s = [0.005, 0.01]
tokens_per_chunk = [1, 3]
labelled = true
"""


class Mock:
    """A running `poise bench mock`."""

    def __init__(self, profile: str) -> None:
        self.process = subprocess.Popen(
            [*POISE, "bench", "mock", "--port", "0", "--profile", profile],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline() for _ in range(2)]
        self.url = self.lines[1].split()[1].removesuffix("/v1;")

    def served(self) -> list[Served]:
        with urllib.request.urlopen(self.url + "/mock/served") as answer:
            return msgspec.json.decode(answer.read(), type=list[Served])

    def stop(self, number: signal.Signals) -> tuple[int, str, str]:
        self.process.send_signal(number)
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors


@pytest.fixture
def mock(tmp_path: Path) -> Iterator[Mock]:
    path = tmp_path / "labelled.toml"
    path.write_text(LABELLED)
    running = Mock(str(path))
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


def measure(mock: Mock, arrivals: Arrivals, n: int) -> tuple[RunRecord, list[RequestRow]]:
    workload = RandomTokens(Constant(32), Constant(9))
    schedule = draw_schedule(workload, arrivals, 1, num_requests=n, num_warmups=1)
    target = Target(mock.url, "/v1/completions", "mock")
    return asyncio.run(run_schedule(schedule, target, RunSettings()))


@pytest.mark.parametrize(
    "arrivals", [ClosedLoop(3), OpenArrivals(100.0, math.inf), OpenArrivals(100.0)], ids=str
)
def test_both_sides_saw_the_same_requests(mock: Mock, arrivals: Arrivals) -> None:
    record, rows = measure(mock, arrivals, 20)
    served = mock.served()[1:]
    pairs = pair(rows, served)
    assert len(pairs) == len(rows) == len(served) == 20
    for row, one in pairs:
        assert (row.status, one.outcome) == ("ok", "done")
        assert row.chunk_tokens == [event.num_tokens for event in token_events(one)]
        assert row.completion_tokens == one.completion_tokens == 9
        assert row.prompt_tokens == one.prompt_tokens == 32
    comparisons = {item.figure: item for item in compare_run(record, served)}
    assert comparisons["answered"].agrees
    for metric in MOCK_METRICS.values():
        assert comparisons[f"mean {metric}"].expected is not None
        assert comparisons[f"p50 {metric}"].reported is not None


def test_the_measured_time_is_never_less_than_the_real_one(mock: Mock) -> None:
    _, rows = measure(mock, ClosedLoop(2), 10)
    for row, one in pair(rows, mock.served()[1:]):
        assert row.first_token is not None
        assert row.end is not None
        assert row.sent is not None
        assert row.first_token - row.sent >= token_events(one)[0].written - one.arrived
        assert row.end - row.sent >= one.events[-1].written - one.arrived


def test_the_counters_agree_with_both(mock: Mock) -> None:
    record, _ = measure(mock, ClosedLoop(2), 5)
    last = record.metrics[-1].values
    assert last["vllm:generation_tokens_total"] == 6 * 9 - 9 + 8  # the warm-up asks for eight
    assert last["vllm:prompt_tokens_total"] == 5 * 32 + 64
    assert last["vllm:num_requests_running"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_mock_with_status_0(mock: Mock, number: signal.Signals) -> None:
    assert "chunks of one and three tokens" in mock.lines[0]
    body = json.dumps({"prompt": "a b", "max_tokens": 2}).encode()
    with urllib.request.urlopen(mock.url + "/v1/completions", data=body) as answer:
        found: dict[str, Any] = json.load(answer)
    assert found["usage"]["completion_tokens"] == 2
    status, output, errors = mock.stop(number)
    assert (status, output, errors) == (0, "answered 1 requests\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "steadi"], "steady"),
        (["--profile", "missing.toml"], "No such file"),
        (["--port", "70000"], "70000"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [*POISE, "bench", "mock", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_profiles_can_be_listed() -> None:
    done = subprocess.run(
        [*POISE, "bench", "mock", "--list"], capture_output=True, text=True, check=True
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert {"steady", "role-first", "cut", "split"} <= set(names)
