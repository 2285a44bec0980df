"""The eighteen mistakes of load generators: for each, the situation, what poise reports, and what the mistake would have.

The mock makes the situation and knows what really happened. Figures are held against its own instants, never the wall clock.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from mock_run import Outcome, drawn, one, profile, run, run_twice, target, written

from poise.bench.arrivals import ClosedLoop, OpenArrivals
from poise.bench.client import LoadClient
from poise.bench.conformance import token_events
from poise.bench.lengths import Constant
from poise.bench.measure import meets
from poise.bench.mock_server import MockServer
from poise.bench.record import ClientOptions, RequestRow
from poise.bench.runner import RawRun, Run, RunSettings
from poise.bench.schedule import read_schedule
from poise.bench.workloads import RandomTokens, draw_schedule

# The mistaken figure of a stream without tokens, where "not set" and zero were the same thing.
NOT_SET = 0.0


def slow_sends(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each dispatch holds the client's event loop for so long."""
    send = LoadClient.send

    async def with_work(self: LoadClient, body: bytes, row: RequestRow) -> None:
        time.sleep(seconds)
        await send(self, body, row)

    monkeypatch.setattr(LoadClient, "send", with_work)


def test_01_latency_counts_from_the_planned_instant() -> None:
    service, rate, n = 0.03, 100.0, 10
    schedule = drawn(OpenArrivals(rate, math.inf, max_concurrency=1), n, output=1)
    found = run(schedule, profile({"first_token_s": service}))
    last = found.rows[-1]
    assert last.end is not None
    assert last.sent is not None
    response = last.end - last.planned
    naive = last.end - last.sent
    assert response - naive >= (n - 1) * (service - 1 / rate)
    assert found.full.distributions["e2el"].maximum == max(
        row.end - row.planned for row in found.rows if row.end is not None
    )
    assert found.full.distributions["e2el_from_send"].maximum < response  # type: ignore[operator]
    assert found.full.figures["blocked_share"].value is not None
    assert found.full.figures["blocked_share"].value > 0.5


def test_02_sends_keep_absolute_instants_or_the_run_is_invalid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate, work, n = 200.0, 0.003, 40
    slow_sends(monkeypatch, work)
    schedule = drawn(OpenArrivals(rate, math.inf), n, output=1)
    found = run(schedule, profile({"first_token_s": 0.0}))
    assert [row.planned for row in found.rows] == pytest.approx([k / rate for k in range(n)])
    sent = [row.sent for row in found.rows if row.sent is not None]
    relative = (n - 1) * (1 / rate + work)  # a sleep of one gap after each dispatch
    assert sent[-1] - sent[0] < relative or found.gate("achieved rate").verdict == "fail"


def test_02_a_rate_that_was_not_reached_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_sends(monkeypatch, 0.004)
    found = run(drawn(OpenArrivals(1000.0, math.inf), 40, output=1), profile({"first_token_s": 0}))
    assert found.gate("achieved rate").verdict == "fail"
    assert not found.record.valid


def test_03_an_empty_first_chunk_is_no_token() -> None:
    row, served = one(chat=True, role_at_s=0.002, num_empty_chunks=1, first_token_s=0.03)
    naive = row.first_event
    assert row.first_token is not None
    assert naive is not None
    assert written(served, "content", 0) <= row.first_token <= written(served, "content", 1)
    assert naive < written(served, "content")


def test_04_reasoning_has_its_own_first_token_and_null_is_not_zero() -> None:
    row, served = one(chat=True, num_reasoning_tokens=3, first_token_s=0.01)
    assert row.first_token == row.first_reasoning
    assert row.first_reasoning is not None
    assert row.first_answer is not None
    assert row.first_reasoning < written(served, "content") <= row.first_answer

    row, served = one(chat=True, num_reasoning_tokens=8, first_token_s=0.01)
    assert row.first_reasoning is not None
    assert row.first_reasoning >= written(served, "reasoning")
    assert row.first_answer is None
    assert row.first_answer != NOT_SET


def test_05_a_chunk_is_not_a_token() -> None:
    row, served = one(tokens_per_chunk=[1, 4, 2], gap_s=[0.01], max_tokens=7)
    assert row.chunk_tokens == [1, 4, 2]
    assert sum(row.chunk_tokens) == row.completion_tokens == served.completion_tokens == 7
    assert row.token_source == "continuous usage"
    naive_tokens = len(row.chunk_times)
    assert naive_tokens == 3


def test_05_without_running_usage_the_tokens_of_chunks_are_unknown() -> None:
    row, _ = one(tokens_per_chunk=[1, 4, 2], usage="finish_chunk", max_tokens=7)
    assert len(row.chunk_times) == 3
    assert row.completion_tokens == 7
    assert row.token_source is None
    assert row.chunk_tokens == []


@pytest.mark.parametrize(
    ("usage", "reported"),
    [("missing", None), ("asked", 8), ("continuous", 8), ("finish_chunk", 8)],
)
def test_06_the_last_usage_counts_and_is_never_summed(usage: str, reported: int | None) -> None:
    row, served = one(usage=usage, finish="own_chunk")
    assert row.completion_tokens == reported
    assert row.status == "ok"
    naive_sum = sum(range(1, 9)) + 2 * 8  # every chunk's running total, the finish and usage chunks
    assert naive_sum != served.completion_tokens


def test_07_text_is_joined_before_anybody_tokenises_it() -> None:
    row, served = one(tokens_per_chunk=[1, 2], max_tokens=6)
    assert row.text == "".join(event.text for event in served.events)

    def tokens_with_bos(text: str) -> int:
        return 1 + text.count(" t")

    naive = sum(tokens_with_bos(event.text) for event in token_events(served))
    assert row.text is not None
    assert tokens_with_bos(row.text) - 1 == row.completion_tokens == 6
    assert naive == 6 + len(row.chunk_times)


@pytest.mark.parametrize(
    "parts",
    [
        {"piece_bytes": 1},
        {"piece_bytes": 7, "line_end": "\r\n"},
        {"line_end": "\r"},
        {"events_per_write": 3, "piece_bytes": 50},
        {"heartbeat_s": 0.002},
        {"padding_bytes": 300_000},
    ],
    ids=str,
)
def test_08_text_does_not_depend_on_how_the_bytes_were_cut(parts: dict[str, object]) -> None:
    row, served = one(token_text=" é🙂", gap_s=[0.005], **parts)
    expected = "".join(f" é🙂{number}" for number in range(8))
    assert row.status == "ok"
    assert row.text == expected == "".join(event.text for event in served.events)
    instants = [event.written for event in token_events(served)]
    assert len(row.chunk_times) == len(instants) == 8
    assert all(stamp >= instant for stamp, instant in zip(row.chunk_times, instants, strict=True))
    naive = "".join(chr(byte) for byte in expected.encode())  # each byte decoded on its own
    assert naive != expected


def test_08_an_event_is_stamped_when_its_last_byte_came() -> None:
    row, served = one(piece_bytes=120, piece_gap_s=0.01, max_tokens=2, first_token_s=0)
    assert row.first_token is not None
    assert row.first_byte is not None
    assert row.first_token >= written(served, "content") > row.first_byte


def test_08_heartbeats_are_neither_events_nor_tokens() -> None:
    row, served = one(heartbeat_s=0.003, first_token_s=0.03)
    assert written(served, "comment") < written(served, "content")
    assert row.first_event is not None
    assert row.first_event >= written(served, "content")


def test_09_without_a_second_token_there_is_no_time_per_token() -> None:
    for num_tokens in (0, 1):
        settings = RunSettings(goodput_slos={"tpot": 600.0})
        found = run(
            drawn(ClosedLoop(1), 3),
            profile({"num_tokens": num_tokens, "first_token_s": 0.001}),
            settings,
        )
        tpot = found.full.distributions["tpot"]
        assert (tpot.n, tpot.mean) == (0, None)
        assert found.full.figures["goodput_share"].value == 0.0
        assert all(row.status == "ok" for row in found.rows)
        naive = sum(NOT_SET <= 600.0 for _ in found.rows) / len(found.rows)
        assert naive == 1.0


@pytest.mark.parametrize(
    ("parts", "status", "http_status"),
    [
        ({"end": "error_event", "end_after_chunks": 3}, "error", 200),
        ({"end": "no_done", "end_after_chunks": 3}, "truncated", 200),
        ({"end": "cut", "end_after_chunks": 3}, "truncated", 200),
        ({"end": "reset", "end_after_chunks": 3, "gap_s": [0.02]}, "truncated", 200),
        ({"end": "stall", "end_after_chunks": 3}, "timeout", 200),
        ({"status": 429}, "error", 429),
        ({"status": 500}, "error", 500),
        ({"answer": "html"}, "error", 200),
        ({"answer": "json"}, "error", 200),
    ],
    ids=str,
)
def test_10_each_way_to_fail_has_its_class(
    parts: dict[str, object], status: str, http_status: int
) -> None:
    limit = 0.3 if status == "timeout" else 600.0
    row, served = one(options=ClientOptions(timeout_s=limit), **parts)
    assert (row.status, row.http_status) == (status, http_status)
    assert row.error
    if served.events and served.outcome != "done":
        naive_success = row.http_status == 200 and row.first_token is not None
        assert naive_success
        assert len(row.chunk_times) == 3


def test_10_failures_are_misses_over_what_was_offered() -> None:
    quick = {"first_token_s": 0.002, "gap_s": [0.001]}
    mixed = profile(
        quick,
        quick | {"end": "error_event", "end_after_chunks": 2},
        quick | {"end": "cut", "end_after_chunks": 2},
        quick | {"status": 429},
    )
    settings = RunSettings(goodput_slos={"ttft": 600.0})
    found = run(drawn(ClosedLoop(1), 4), mixed, settings)
    statuses = {"ok": 1, "error": 2, "truncated": 1}
    assert found.full.statuses == statuses
    assert found.full.figures["goodput_share"].value == 1 / 4
    naive = sum(meets(row, {"ttft": 600.0}) for row in found.rows) / statuses["ok"]
    assert naive == 1.0
    ttft = found.full.distributions["ttft"]
    assert (ttft.n, ttft.num_missed) == (4, 3)
    assert all(item.value is None for item in ttft.percentiles)
    assert not found.record.valid


def test_10_what_the_run_gave_up_is_cancelled_not_forgotten() -> None:
    async def inside() -> RawRun:
        async with MockServer(profile({"end": "stall", "end_after_chunks": 1})) as mock:
            execution = Run(drawn(ClosedLoop(2), 5), target(mock), RunSettings())
            asyncio.get_running_loop().call_later(0.5, execution.stop, "stopped by the test")
            return await execution.execute()

    raw = asyncio.run(inside())
    assert [row.status for row in raw.rows] == ["cancelled"] * 5
    assert raw.stopped == "stopped by the test"


def test_11_a_repeated_run_that_met_a_warm_cache_is_not_cold() -> None:
    settings = RunSettings(client=ClientOptions(cache="cold"))
    cold, warm = run_twice(
        drawn(ClosedLoop(1), 4, prompt=64),
        profile({"first_token_s": 0.001, "uncached_token_s": 0.0003}, prefix_cache=True),
        settings,
    )
    assert cold.gate("cache label").verdict == "pass"
    assert warm.gate("cache label").verdict == "fail"
    assert [row.cached_tokens for row in warm.rows] == [48] * 4
    assert not warm.record.valid

    def scheduled(found: Outcome) -> list[float]:
        return [served.events[0].planned - served.admitted for served in found.served]

    assert scheduled(warm) == pytest.approx([0.001 + 16 * 0.0003] * 4)  # what would be believed
    assert scheduled(cold) == pytest.approx([0.001 + 64 * 0.0003] * 4)


def test_12_ramp_and_drain_are_told_apart_from_the_steady_window() -> None:
    quick = {"first_token_s": 0.02, "num_tokens": 1}
    straggler = quick | {"first_token_s": 0.6}
    found = run(drawn(ClosedLoop(4), 80, output=1), profile(*[quick] * 79, straggler))
    full, steady = found.full, found.record.summary["steady"]
    assert full.begin <= steady.begin < steady.end < full.end
    naive = found.record.figure("output_throughput")
    better = found.record.figure("output_throughput", "steady")
    assert naive is not None
    assert better is not None
    assert naive < better
    assert full.end - steady.end >= 0.5  # the drain


def test_13_throughput_is_tokens_over_time_not_a_mean_of_rates() -> None:
    found = run(drawn(ClosedLoop(4), 12), profile({"first_token_s": 0.01, "gap_s": [0.005]}))
    tokens = sum(served.completion_tokens for served in found.served)
    seconds = found.full.end - found.full.begin
    assert found.record.figure("output_throughput") == pytest.approx(tokens / seconds)
    naive = fmean(4 / (row.end - row.sent) for row in found.rows if row.end and row.sent)
    assert not math.isclose(naive, tokens / seconds, rel_tol=0.1)
    assert "mean" not in found.full.figures["output_throughput"].definition


def test_14_warm_up_prompts_are_not_measured() -> None:
    workload = RandomTokens(Constant(64), Constant(1))
    schedule = draw_schedule(workload, ClosedLoop(1), 7, num_requests=3, num_warmups=2)
    behaviour = profile({"first_token_s": 0.001}, prefix_cache=True)
    found = run(schedule, behaviour)
    assert [served.cached_tokens for served in found.served] == [0, 0, 0]
    assert not {str(one.prompt) for one in schedule.warmups} & {
        str(one.prompt) for one in schedule.requests
    }
    naive = run(replace(schedule, warmups=schedule.requests[:1]), behaviour)
    assert [served.cached_tokens for served in naive.served] == [48, 0, 0]


def test_15_a_schedule_is_a_file_that_replays_exactly(tmp_path: Path) -> None:
    schedule = drawn(OpenArrivals(200.0), 20)
    schedule.write(tmp_path / "schedule.json")
    again = read_schedule(tmp_path / "schedule.json")
    assert again.sha256 == schedule.sha256
    behaviour = profile({"first_token_s": 0.0, "gap_s": [0]}, prefix_cache=True)
    first, second = run(schedule, behaviour), run(again, behaviour)
    assert [row.planned for row in first.rows] == [row.planned for row in second.rows]
    assert first.record.schedule == second.record.schedule
    assert len(second.served) == 20


def test_15_poisson_arrivals_are_poisson_and_not_reshaped() -> None:
    rate, n = 50.0, 2000
    instants = [request.at for request in drawn(OpenArrivals(rate), n, prompt=1).requests]
    known = [at for at in instants if at is not None]
    gaps = sorted(b - a for a, b in pairwise(known))
    law = [1 - math.exp(-rate * gap) for gap in gaps]
    distance = max(max((k + 1) / len(law) - p, p - k / len(law)) for k, p in enumerate(law))
    assert distance < 1.36 / math.sqrt(len(law))  # Kolmogorov–Smirnov at 5 %
    constant = [1 - math.exp(-1.0)] * len(law)  # a constant gap called Poisson
    assert max(abs((k + 1) / len(law) - p) for k, p in enumerate(constant)) > 0.5

    ends = [
        drawn(OpenArrivals(rate), 100, prompt=1, seed=seed).requests[-1].at for seed in range(20)
    ]
    assert len(set(ends)) == 20  # rescaled arrivals would all end at n / rate


def test_16_answers_shorter_than_planned_fail_the_guard() -> None:
    found = run(drawn(ClosedLoop(1), 4, output=10), profile({"num_tokens": 3, "gap_s": [0.001]}))
    assert found.gate("output length").verdict == "fail"
    assert [row.completion_tokens for row in found.rows] == [3] * 4
    wall = found.full.end - found.full.begin
    assert found.record.figure("output_throughput") == pytest.approx(12 / wall)
    naive = sum(row.expected_output_tokens or 0 for row in found.rows) / wall
    assert naive == pytest.approx(40 / wall)


@pytest.mark.parametrize("n", [1, 30])
def test_17_a_tail_of_few_samples_is_said_to_be_one(n: int) -> None:
    found = run(drawn(ClosedLoop(1), n, output=2), profile({"first_token_s": 0, "gap_s": [0.001]}))
    p99 = found.full.distributions["e2el"].percentile(99.0)
    assert p99 is not None
    assert p99.high is None
    assert p99.note is not None
    assert "n too small" in p99.note
    naive = sorted(row.end - row.planned for row in found.rows if row.end is not None)[-1]
    assert p99.value == naive  # the maximum, which others print as a p99


def test_18_a_client_that_can_not_keep_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_sends(monkeypatch, 0.02)
    found = run(drawn(OpenArrivals(100.0, math.inf), 20, output=1), profile({"first_token_s": 0}))
    assert found.gate("dispatch lag").verdict == "fail"
    assert not found.record.valid
    service = found.full.distributions["ttft_from_send"].mean
    response = found.full.distributions["ttft"].mean
    assert service is not None
    assert response is not None
    assert service < response  # the naive figure blames nobody


def test_missing_usage_is_not_guessed() -> None:
    found = run(drawn(ClosedLoop(1), 3, output=10), profile({"usage": "missing", "num_tokens": 3}))
    assert found.record.figure("output_throughput") is None
    assert found.gate("token reconciliation").verdict == "fail"
    assert found.full.distributions["itl"].n == 0


def test_answers_in_one_piece_have_no_first_token() -> None:
    settings = RunSettings(client=ClientOptions(stream=False))
    found = run(drawn(ClosedLoop(1), 3), profile({"first_token_s": 0.002}), settings)
    assert {row.status for row in found.rows} == {"ok"}
    for name in ("ttft", "tpot", "itl", "chunk_gap"):
        distribution = found.full.distributions[name]
        assert (distribution.n, distribution.mean) == (0, None)
    assert found.full.distributions["e2el"].n == 3
    assert found.record.figure("output_throughput") is not None
