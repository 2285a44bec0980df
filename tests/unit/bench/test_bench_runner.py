"""Runs against scripted servers: order, limits, classes of failure, and what the command line makes of them."""

from __future__ import annotations

import asyncio
import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench_scripted_server import (
    HEAD,
    Answer,
    ScriptedServer,
    chunk,
    event,
    plain,
    serving,
    stream,
    text,
    tokens,
)

from poise.bench.arrivals import ClosedLoop, OpenArrivals
from poise.bench.client import ServerError, Target
from poise.bench.gates import GateLimits
from poise.bench.lengths import Constant
from poise.bench.record import ClientOptions, RequestRow, RunRecord, read_rows, read_run
from poise.bench.runner import Progress, Run, RunSettings, reach, run_schedule
from poise.bench.schedule import Schedule
from poise.bench.wire import Connection, Exchange
from poise.bench.workloads import RandomTokens, draw_schedule
from poise.cli.main import run as poise

WORKLOAD = RandomTokens(Constant(3), Constant(4))


def closed(n: int, concurrency: int = 2, num_warmups: int = 0) -> Schedule:
    return draw_schedule(
        WORKLOAD, ClosedLoop(concurrency), 1, num_requests=n, num_warmups=num_warmups
    )


def execute(
    server: ScriptedServer, schedule: Schedule, **client: Any
) -> tuple[RunRecord, list[RequestRow]]:
    target = Target(server.url, "/v1/completions", "tiny")
    settings = RunSettings(client=ClientOptions(**client), scrape_metrics=False, keep_text=True)
    return asyncio.run(run_schedule(schedule, target, settings))


def one(answer: Answer, **client: Any) -> RequestRow:
    """The row of a single request to a server that answers so."""
    with serving(answer) as server:
        return execute(server, closed(1), **client)[1][0]


def gate(record: RunRecord, name: str) -> str:
    return next(gate.verdict for gate in record.gates if gate.name == name)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_closed_loop_sends_everything_in_order_within_its_limit(reuse: bool) -> None:
    with serving(tokens) as server:
        record, rows = execute(
            server, closed(9, 3, num_warmups=2), reuse_connections=reuse, num_warmups=2
        )
    assert [row.status for row in rows] == ["ok"] * 9
    assert [row.text for row in rows] == ["abababab"] * 9
    assert [row.completion_tokens for row in rows] == [4] * 9
    assert {row.token_source for row in rows} == {"one per chunk"}
    assert len(server.bodies) == 11
    assert server.bodies[0]["max_tokens"] == 8  # warm-ups come first and are not measured
    assert [body["prompt"] for body in server.bodies[2:5]] == [
        list(request.prompt) for request in closed(9).requests[:3]
    ]
    assert (server.connections < 8) == reuse
    for row in rows:
        assert row.planned == row.ready
        assert row.ready is not None
        times = [row.ready, row.sent, row.first_byte, row.first_event, row.first_token, row.end]
        assert times == sorted(times)  # type: ignore[type-var]
    starts = [(row.sent, 1) for row in rows] + [(row.end, -1) for row in rows]
    running = peak = 0
    for _, step in sorted(starts):
        running += step
        peak = max(peak, running)
    assert peak == 3
    assert gate(record, "answered") == "pass"
    assert gate(record, "little's law") == "pass"
    assert record.schedule.sha256 == closed(9, 3, num_warmups=2).sha256


def test_open_arrivals_are_sent_at_their_instants_whatever_the_server_does() -> None:
    schedule = draw_schedule(WORKLOAD, OpenArrivals(200.0), 1, num_requests=20, num_warmups=0)
    with serving(stream(0.3, text("a", "length"))) as server:
        _, rows = execute(server, schedule)
    assert [row.planned for row in rows] == [request.at for request in schedule.requests]
    assert all(row.sent is not None and row.sent >= row.planned for row in rows)
    last_sent = max(row.sent or 0.0 for row in rows)
    assert last_sent < min(row.end or 0.0 for row in rows)  # none waited for an answer


def test_a_limit_on_open_arrivals_counts_the_waiting() -> None:
    schedule = draw_schedule(
        WORKLOAD, OpenArrivals(1000.0, 1.0, 1), 1, num_requests=5, num_warmups=0
    )
    with serving(tokens) as server:
        record, rows = execute(server, schedule)
    for before, after in zip(rows, rows[1:]):  # noqa: RUF007
        assert after.ready is not None
        assert before.end is not None
        assert after.ready >= before.end > after.planned
    assert record.figure("blocked_share") == 0.8


def test_a_request_says_what_was_planned() -> None:
    with serving(tokens) as server:
        execute(server, closed(1), extra_body={"top_p": 0.5, "temperature": 1})
    assert server.bodies[0] == {
        "model": "tiny",
        "prompt": list(closed(1).requests[0].prompt),
        "max_tokens": 4,
        "temperature": 1,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "top_p": 0.5,
    }


def test_the_key_is_sent_and_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISE_BENCH_API_KEY", "secret-key")
    with serving(tokens) as server:
        status = bench(server.url, tmp_path)
    assert status == 0
    assert b"Authorization: Bearer secret-key" in server.heads[0]
    assert not [path for path in tmp_path.iterdir() if "secret-key" in path.read_text()]


def test_no_stream_has_no_first_token() -> None:
    body = {"choices": [{"text": "hi", "finish_reason": "length"}]}
    body["usage"] = {"prompt_tokens": 3, "completion_tokens": 4}  # type: ignore[assignment]
    with serving(plain("200 OK", "application/json", json.dumps(body).encode())) as server:
        record, rows = execute(server, closed(3), stream=False)
    assert {row.status for row in rows} == {"ok"}
    assert {row.first_token for row in rows} == {None}
    assert record.summary["full"].distributions["ttft"].n == 0
    assert record.summary["full"].distributions["e2el"].n == 3
    assert "stream_options" not in server.bodies[0]


GOOD = text("a") + text("b", "stop")
ENDED = b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (plain("429 Too Many Requests", "application/json", b'{"error": {"message": "slow down"}}'), "error", "HTTP 429: slow down"),
        (plain("500 Oops", "text/html", b"<h1>no</h1>"), "error", "HTTP 500: <h1>no</h1>"),
        (plain("307 Elsewhere", "text/plain", b"", "Location: /x\r\n"), "error", "HTTP 307: (empty)"),
        (plain("200 OK", "text/html", b"<h1>hi</h1>"), "error", "a stream was asked for, text/html came: <h1>hi</h1>"),
        (stream(text("a"), event({"error": {"message": "out of memory"}}), ENDED), "error", "out of memory"),
        (stream(text("a"), chunk(b"data: nonsense\n\n"), text("b", "stop"), ENDED), "error", "an event is not an OpenAI object: nonsense"),
        (stream(text("a"), ENDED), "truncated", "without a finish reason"),
        (stream(text("a"), chunk(b'data: {"choi'), ENDED), "truncated", "without a finish reason"),
        (stream(text("a")), "truncated", "the connection ended inside the answer"),
        (stream(), "error", "the connection ended inside the answer"),
        (stream(text("a", "abort"), ENDED), "error", "finish reason 'abort'"),
        (stream(text("a"), 30.0), "timeout", "no end within 0.3 s"),
        (stream(GOOD, ENDED), "ok", None),
        (stream(text("a"), chunk(b"data: [DONE]\n\n"), 30.0), "ok", None),
        (stream(text("a"), chunk(b"data: [DONE]"), ENDED), "ok", None),
    ],
)  # fmt: skip
def test_classes(answer: Answer, status: str, reason: str | None) -> None:
    row = one(answer, timeout_s=0.3)
    assert row.status == status, row.error
    assert (row.error is None) == (reason is None)
    assert reason is None or reason in (row.error or "")
    assert row.end is not None


async def hang_up(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.close()


async def not_http(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello\r\n\r\n")


async def until_the_end(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """HTTP/1.0 style: the end of the connection is the end of the answer."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n")
    writer.write(b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\n')


async def byte_by_byte(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Every byte in a read of its own, inside characters and line ends too."""
    stream = 'data: {"choices":[{"text":"é😀"}]}\r\n\r\ndata: [DONE]\r\n\r\n'.encode()
    for byte in HEAD + chunk(stream):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)


def test_a_connection_that_breaks_before_an_answer() -> None:
    row = one(hang_up)
    assert (row.status, row.http_status) == ("error", None)
    assert row.error == "the server closed the connection before it answered"
    assert "not HTTP" in (one(not_http).error or "")


def test_an_answer_may_end_with_its_connection() -> None:
    assert (one(until_the_end).status, one(until_the_end).text) == ("ok", "a")


def test_cuts_do_not_change_the_text() -> None:
    assert one(byte_by_byte).text == "é😀"


def test_tokens_are_counted_by_running_usage() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": {"completion_tokens": 0}})  # fmt: skip
    parts = [
        event({"choices": [{"delta": {"content": "x"}}], "usage": {"completion_tokens": n}})
        for n in (1, 4, 6)
    ]
    last = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6}})
    row = one(stream(role, 0.02, *parts, last, chunk(b"data: [DONE]\n\n"), ENDED))
    assert (row.chunk_tokens, row.completion_tokens) == ([1, 3, 2], 6)
    assert row.token_source == "continuous usage"
    assert row.first_event is not None
    assert row.first_token is not None
    assert row.first_token > row.first_event


def test_reasoning_alone_has_no_answer_time() -> None:
    thought = event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    row = one(stream(thought, chunk(b"data: [DONE]\n\n"), ENDED))
    assert row.first_reasoning == row.first_token is not None
    assert row.first_answer is None


def test_a_server_that_dies_ends_the_run_with_what_was_measured() -> None:
    answered = 0

    async def dying(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        answered += 1
        await (tokens if answered <= 5 else hang_up)(body, writer)

    with serving(dying) as server:
        record, rows = execute(server, closed(500))
    assert record.stopped is not None
    assert record.stopped.startswith("the server is gone: ")
    assert not record.valid
    assert sum(row.status == "ok" for row in rows) == 5
    assert len(rows) == 500
    assert rows[-1].status == "cancelled"
    assert rows[-1].error == "never sent: the run ended first"


def test_stopping_keeps_what_was_measured() -> None:
    async def run() -> list[RequestRow]:
        target = Target(server.url, "/v1/completions", "tiny")
        made: list[Run] = []

        def stop_after_two(progress: Progress) -> None:
            if progress.done >= 2:
                made[0].stop("interrupted")

        made.append(Run(closed(50, 1), target, RunSettings(scrape_metrics=False), stop_after_two))
        raw = await made[0].execute()
        assert raw.stopped == "interrupted"
        return raw.rows

    with serving(stream(0.1, GOOD, ENDED)) as server:
        rows = asyncio.run(run())
    statuses = [row.status for row in rows]
    assert statuses.count("ok") >= 2
    assert statuses[-1] == "cancelled"


def test_a_fault_of_ours_does_not_pass_for_a_slow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("poise.bench.client.read_stream", broken)
    with serving(tokens) as server, pytest.raises(RuntimeError, match="ours"):
        execute(server, closed(5))


def test_a_failed_warm_up_is_one_line() -> None:
    refused = plain("400 Bad Request", "application/json", b'{"error":{"message":"no"}}')
    with serving(refused) as server, pytest.raises(ServerError, match=r"warm-up.*HTTP 400: no"):
        execute(server, closed(3, num_warmups=1))


def test_reach_names_the_model_and_what_is_wrong() -> None:
    with serving(tokens) as server:
        assert asyncio.run(reach(Target(server.url, "/v1/completions", ""))).model == "tiny"
    with pytest.raises(ServerError, match=server.url):
        asyncio.run(reach(Target(server.url, "/v1/completions", "x")))


@pytest.fixture(autouse=True)
def _a_busy_machine_fails_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """How late this process wakes up is the machine's affair; the gates of time have their own tests."""
    patient = partial(GateLimits, rate_seconds=60.0, dispatch_lag_s=60.0, loop_lag_s=60.0)
    monkeypatch.setattr("poise.cli.bench_serve.GateLimits", patient)


def bench(url: str, folder: Path, *flags: str) -> int:
    base = ["bench", "serve", "--url", url, "--num-prompts", "6", "--max-concurrency", "2"]
    files = ["--result-dir", str(folder), "--result-filename", "run.json"]
    small = ["--random-input-len", "3", "--random-output-len", "4"]
    return poise([*base, *files, *small, *flags])


def test_the_command_writes_record_rows_schedule_and_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tokens) as server:
        flags = ["--csv", str(tmp_path / "run.csv"), "--save-schedule", str(tmp_path / "s.json")]
        more = ["--goodput", "ttft:9000", "e2el:9000", "--percentile-metrics", "ttft,e2el"]
        assert bench(server.url, tmp_path, *flags, *more) == 0
        record = read_run(tmp_path / "run.json")
        again = ["bench", "serve", "--url", server.url, "--schedule", str(tmp_path / "s.json")]
        assert poise([*again, "--result-filename", str(tmp_path / "again.json")]) == 0
    assert record.valid
    assert record.figure("goodput_share") == 1.0
    assert len(read_rows(record, tmp_path / "run.json")) == 6
    assert read_run(tmp_path / "again.json").schedule == record.schedule
    assert "full,goodput_share,value,1.0," in (tmp_path / "run.csv").read_text()
    shown = capsys.readouterr()
    assert "n<368" in shown.out
    assert "tok/s" in shown.out
    assert shown.err == ""  # nobody watches: no progress


def test_one_request_gives_values_and_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tokens) as server:
        assert bench(server.url, tmp_path, "--num-prompts", "1", "--max-concurrency", "1") == 0
    ttft = read_run(tmp_path / "run.json").summary["full"].distributions["ttft"]
    assert ttft.n == 1
    assert {item.value for item in ttft.percentiles} == {ttft.mean}
    assert all((item.note or "").startswith("n too small") for item in ttft.percentiles)
    capsys.readouterr()


def test_a_run_that_fails_a_gate_is_kept_and_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(stream(GOOD, ENDED)) as server:  # no usage
        assert bench(server.url, tmp_path, "--num-warmups", "0") == 1
    assert not read_run(tmp_path / "run.json").valid
    assert "invalid run: token reconciliation: the server sent no usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "complaint"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9: "),
        (["--url", "ftp://x"], 2, "--base-url"),
        (["--endpoint", "v1"], 2, "--endpoint"),
        (["--extra-body", "{"], 2, "--extra-body"),
        (["--metric-percentiles", "100"], 2, "--metric-percentiles"),
        (["--goodput", "speed:1"], 2, "--goodput"),
        (["stray"], 2, "unexpected argument 'stray'"),
        (["--dataset-name", "custom"], 2, "--dataset-path"),
        (["--request-rate", "-1"], 2, "--request-rate"),
        (["--percentile-metrics", "speed"], 2, "--percentile-metrics"),
        (["--schedule", "/nowhere.json"], 1, "/nowhere.json"),
        (["--result-dir", "/nowhere"], 2, "/nowhere"),
        (["--token-range", "5:1"], 2, "--token-range"),
    ],
)
def test_wrong_use_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    status: int,
    complaint: str,
) -> None:
    with serving(tokens) as server:
        assert bench(server.url, tmp_path, *flags) == status
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reuse", [False, True])
def test_what_a_request_used_goes_without_the_garbage_collector(reuse: bool) -> None:
    """The collector stands still during a run."""
    threshold = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with serving(tokens) as server:
            execute(server, closed(20), reuse_connections=reuse)
        left = [item for item in gc.get_objects() if isinstance(item, Exchange | Connection)]
    finally:
        gc.set_threshold(*threshold)
    assert len(left) <= 2
