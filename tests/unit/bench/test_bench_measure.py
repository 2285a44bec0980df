"""Figures of rows worked out by hand: latencies, throughput, goodput, windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poise.bench.measure import (
    chunk_gaps,
    itl_request_mean,
    meets,
    parse_slos,
    summarise,
    token_intervals,
    tpot,
)
from poise.bench.record import (
    ClientOptions,
    RecordError,
    RequestRow,
    RunRecord,
    ScheduleInfo,
    ServerInfo,
    read_rows,
    read_run,
    write_run,
)
from poise.bench.scrape import RawScrape, difference, parse, server_figures
from poise.bench.statistics import PercentileChoice
from poise.bench.windows import full_window, mser5_cut, steady_window
from poise.errors import ConfigError

CHOICE = PercentileChoice((50.0,))


def row(index: int = 0, planned: float = 0.0, **changes: object) -> RequestRow:
    """Sent 1 s late; tokens 2, 3 and 5 s after the plan, four of them; end at 6."""
    found = RequestRow(
        index,
        planned=planned,
        ready=planned,
        sent=planned + 1,
        first_token=planned + 2,
        first_answer=planned + 2,
        end=planned + 6,
        status="ok",
        prompt_tokens=10,
        completion_tokens=4,
        chunk_times=[planned + 2, planned + 3, planned + 5],
        chunk_tokens=[1, 1, 2],
        token_source="continuous usage",
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def median(rows: list[RequestRow], name: str) -> float | None:
    found = summarise(rows, *full_window(rows), CHOICE).distributions[name]
    return found.percentiles[0].value


def test_definitions() -> None:
    rows = [row()]
    assert median(rows, "ttft") == 2.0
    assert median(rows, "ttft_from_send") == 1.0
    assert median(rows, "e2el") == 6.0
    assert median(rows, "e2el_from_send") == 5.0
    assert median(rows, "tpot") == pytest.approx(4 / 3)
    assert median(rows, "dispatch_lag") == 1.0
    assert median(rows, "client_queue") == 0.0
    assert chunk_gaps(rows[0]) == [1.0, 2.0]
    assert token_intervals(rows[0]) == [1.0, 1.0, 1.0]
    assert itl_request_mean(rows[0]) == 1.0


def test_chunks_without_counts_have_gaps_but_no_intervals() -> None:
    blind = row(chunk_tokens=[], token_source=None)
    found = summarise([blind], 0.0, 6.0, CHOICE).distributions
    assert found["chunk_gap"].n == 2
    assert found["itl"].n == 0
    assert found["itl_request_mean"].n == 0


@pytest.mark.parametrize("tokens", [0, 1, None])
def test_tpot_of_fewer_than_two_tokens_is_undefined_and_no_goodput(tokens: int | None) -> None:
    short = row(completion_tokens=tokens)
    assert tpot(short) is None
    assert not meets(short, {"tpot": 1000.0})


def test_an_answer_in_one_piece_has_no_first_token() -> None:
    whole = row(
        first_token=None, first_answer=None, chunk_times=[], chunk_tokens=[], streamed=False
    )
    failed = row(1, status="timeout", first_token=None)
    found = summarise([whole, failed], 0.0, 6.0, CHOICE).distributions
    assert found["ttft"].n == 0
    assert found["ttft"].percentiles[0].value is None
    assert found["e2el"].n == 2
    assert not meets(whole, {"ttft": 100.0})


def test_failures_are_misses_over_what_was_offered() -> None:
    rows = [row(), row(1, status="error"), row(2, status="truncated"), row(3, status="cancelled")]
    found = summarise(rows, 0.0, 6.0, CHOICE, {"ttft": 2.0, "e2el": 6.0})
    share = found.figures["goodput_share"]
    assert (share.value, share.n) == (0.25, 4)
    assert share.low is not None
    assert share.low < 0.25
    assert found.figures["goodput"].value == pytest.approx(1 / 6)
    assert found.figures["success_share"].value == 0.25
    assert found.distributions["ttft"].num_missed == 3
    assert found.distributions["ttft"].percentiles[0].value is None
    assert found.statuses == {"ok": 1, "error": 1, "truncated": 1, "cancelled": 1}


def test_throughput_is_completed_tokens_over_wall() -> None:
    rows = [row(), row(1, planned=4.0), row(2, status="error")]
    figures = summarise(rows, 0.0, 10.0, CHOICE).figures
    assert figures["output_throughput"].value == pytest.approx(0.8)
    assert figures["prompt_throughput"].value == pytest.approx(2.0)
    assert figures["request_throughput"].value == pytest.approx(0.2)
    assert figures["mean_in_flight"].value == pytest.approx(1.5)


def test_a_part_of_the_run_counts_the_tokens_that_came_in_it() -> None:
    figures = summarise([row(), row(1, planned=2.0)], 2.5, 5.0, CHOICE).figures
    # 3 and 5 of the first request (three tokens), 4 and 5 of the second (two)
    assert figures["output_throughput"].value == pytest.approx(5 / 2.5)
    assert figures["request_throughput"].value == 0.0


def test_throughput_is_unknown_without_usage() -> None:
    figures = summarise([row(completion_tokens=None, prompt_tokens=None)], 0, 6, CHOICE).figures
    assert figures["output_throughput"].value is None
    assert figures["prompt_throughput"].value is None


def test_limits_are_met_up_to_themselves() -> None:
    assert meets(row(), {"ttft": 2.0, "tpot": 4 / 3 + 1e-9, "e2el": 6.0, "itl_p95": 1.0})
    assert meets(row(), {"chunk_gap_p95": 2.0})
    assert not meets(row(), {"chunk_gap_p95": 1.9})
    assert not meets(row(), {"ttft": 1.999})


def test_slos_are_in_milliseconds_as_vllm_writes_them() -> None:
    assert parse_slos(["ttft:1000 tpot:50", "e2el:3000"]) == {"ttft": 1, "tpot": 0.05, "e2el": 3}
    for text in ("ttft", "ttft:x", "ttft:-1", "ttft:0", "speed:1", "ttft:nan"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_slos([text])


def test_a_run_without_rows_has_no_values() -> None:
    found = summarise([], 0.0, 0.0, CHOICE)
    assert found.figures["request_throughput"].value is None
    assert found.figures["success_share"].value is None


def closed(n: int, concurrency: int) -> list[RequestRow]:
    """Slots of one second each, the last one running alone for long."""
    rows = []
    for index in range(n):
        begin = float(index // concurrency)
        rows.append(row(index, begin, sent=begin, end=begin + 1.0))
    rows[-1].end = n / concurrency + 50.0
    return rows


def test_the_steady_window_of_a_closed_loop_leaves_the_drain_out() -> None:
    window, note = steady_window(closed(40, 4), is_closed=True)
    assert window == (0.0, 10.0)
    assert "peak of 4" in note


def test_the_steady_window_of_open_arrivals_leaves_the_warming_up_out() -> None:
    noise = np.random.default_rng(1)
    rows = [row(i, i * 0.1, sent=i * 0.1, end=i * 0.1 + 0.1) for i in range(200)]
    for index, item in enumerate(rows):
        slow = 5.0 if index < 20 else 0.0
        item.end = item.planned + 0.1 + slow + 0.01 * float(noise.random())
    window, note = steady_window(rows, is_closed=False)
    assert window is not None
    assert 2.0 <= window[0] < 12.0
    assert window[1] == pytest.approx(19.9)
    assert "MSER-5" in note


def test_a_growing_queue_is_not_steady() -> None:
    rows = [row(i, i * 0.1, sent=i * 0.1, end=i * 0.1 + 1.0 + i * 0.2) for i in range(200)]
    window, note = steady_window(rows, is_closed=False)
    assert window is None
    assert "no steady window" in note


def test_a_few_requests_are_not_steady() -> None:
    assert steady_window([row()], is_closed=True)[0] is None
    assert mser5_cut(np.array([1.0] * 8)) == 0


METRICS = b"""# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 3.0
vllm:num_preemptions_total{engine="1"} 4.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{le="1.0"} 1.0
vllm:request_prompt_tokens_bucket{le="+Inf"} 1.0
vllm:request_prompt_tokens_count 1.0
vllm:request_prompt_tokens_sum 1.0
python_info 1.0
"""


def test_scrapes_sum_over_labels() -> None:
    before = parse(RawScrape(0.0, "before", METRICS))
    assert before.values["vllm:num_preemptions_total"] == 7.0
    assert not [name for name in before.values if "bucket" in name or "python" in name]
    after = parse(RawScrape(1.0, "after", METRICS.replace(b"3.0", b"5.0")))
    assert difference([before, after], "vllm:num_preemptions_total") == 2.0
    during = parse(RawScrape(0.5, "during", METRICS))
    figures = server_figures([before, during, after])
    assert {name: figure.value for name, figure in figures.items()} == {
        "server_preemptions": 2.0,
        "server_running_mean": 2.0,
        "server_running_peak": 2.0,
    }
    assert difference([before], "vllm:num_preemptions_total") is None


@pytest.mark.parametrize("text", [b"<html>", b'vllm:x{a="', b"\xff\xfe", b"vllm:x one"])
def test_a_page_that_is_no_metrics_is_said(text: bytes) -> None:
    assert parse(RawScrape(0.0, "before", text)).values == {}


def record() -> RunRecord:
    rows = [row()]
    return RunRecord(
        created="2030-01-01T00:00:00+00:00",
        server=ServerInfo("a", "http://a", "/v1/completions", "m"),
        schedule=ScheduleInfo("0" * 64, 1, 1, {"name": "x"}, {"process": "closed"}),
        client=ClientOptions(),
        provenance={"poise": "0"},
        duration_s=6.0,
        summary={"full": summarise(rows, 0.0, 6.0, CHOICE, {"ttft": 1.0})},
        steady_note="",
        gates=[],
        valid=True,
    )


def test_records_and_rows_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    written, rows = record(), [row(), row(1, status="error", error="é\n")]
    write_run(written, rows, path)
    again = read_run(path)
    assert again == written
    assert read_rows(again, path) == rows
    assert sorted(item.name for item in tmp_path.iterdir()) == ["run.json", "run.jsonl"]


def test_other_rows_beside_a_record_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run(record(), [row()], path)
    (tmp_path / "run.jsonl").write_bytes(b"{}\n")
    with pytest.raises(RecordError, match="digest"):
        read_rows(read_run(path), path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": "poise.bench.run/1"}'])
def test_what_is_no_record_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=r"run\.json"):
        read_run(path)


def test_a_disk_that_refuses_is_named() -> None:
    with pytest.raises(RecordError, match="/dev/full"):
        write_run(record(), [row()], Path("/dev/full/run.json"))
