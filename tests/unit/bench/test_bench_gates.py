"""Each gate passes a sound run and fires on one that is broken in just its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from poise.bench.arrivals import ClosedLoop, OpenArrivals
from poise.bench.gates import Observed, judge
from poise.bench.record import Gate, RequestRow, Scrape
from poise.bench.schedule import PlannedRequest, Schedule

HITS = "vllm:prefix_cache_hits_total"


def rows(n: int = 20, gap: float = 0.1) -> list[RequestRow]:
    """Requests a tenth of a second apart that each took half a second and gave four tokens."""
    return [
        RequestRow(
            index,
            planned=index * gap,
            ready=index * gap,
            sent=index * gap + 0.0001,
            first_token=index * gap + 0.2,
            end=index * gap + 0.5,
            status="ok",
            expected_output_tokens=4,
            prompt_tokens=8,
            completion_tokens=4,
            cached_tokens=0,
            chunk_times=[index * gap + 0.2 + 0.1 * step for step in range(4)],
            chunk_tokens=[1, 1, 1, 1],
            token_source="continuous usage",
        )
        for index in range(n)
    ]


def schedule(
    prompts: Sequence[Sequence[int] | str] | None = None, closed: bool = False
) -> Schedule:
    arrivals = ClosedLoop(4).describe() if closed else OpenArrivals(10.0).describe()
    prompts = prompts or [[index, 1, 2] for index in range(20)]
    requests = [PlannedRequest(prompt, 4, index * 0.1) for index, prompt in enumerate(prompts)]
    return Schedule("completions", 1, {}, arrivals, requests)


def observed(found: list[RequestRow]) -> Observed:
    area = sum(r.end - r.sent for r in found if r.sent is not None and r.end is not None)
    return Observed(found, 2.4, area, [0.001] * 200, [])


def verdicts(gates: list[Gate]) -> dict[str, str]:
    return {gate.name: gate.verdict for gate in gates}


def failed(gates: list[Gate]) -> dict[str, str]:
    return {gate.name: gate.reason for gate in gates if gate.verdict == "fail"}


def test_a_sound_run_passes() -> None:
    assert verdicts(judge(observed(rows()), schedule(), "cold")) == {
        "answered": "pass",
        "little's law": "pass",
        "achieved rate": "pass",
        "dispatch lag": "pass",
        "event-loop lag": "pass",
        "token reconciliation": "pass",
        "output length": "pass",
        "cache label": "pass",
    }


def test_nothing_at_all_is_a_failed_run() -> None:
    gates = judge(Observed([], 0.0, 0.0, [], []), schedule(), "natural")
    assert failed(gates) == {"answered": "nothing was offered"}


def test_answered_names_the_commonest_failure() -> None:
    found = rows()
    for row in found[:3]:
        row.status, row.error = "error", "HTTP 429: slow down"
    found[3].status = "timeout"
    reason = failed(judge(observed(found), schedule(), "natural"))["answered"]
    assert reason == "4 of 20 requests failed; 3 of them: HTTP 429: slow down"


def test_a_run_that_was_stopped_is_invalid_though_all_were_answered() -> None:
    seen = replace(observed(rows()), stopped="interrupted")
    assert failed(judge(seen, schedule(), "natural")) == {"answered": "interrupted"}


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_little_fires_on_a_lost_request_or_a_wrong_clock(factor: float) -> None:
    seen = observed(rows())
    seen = replace(seen, in_flight_s=seen.in_flight_s * factor)
    assert list(failed(judge(seen, schedule(), "natural"))) == ["little's law"]


def test_rate_fires_when_sends_drift() -> None:
    found = rows()
    for row in found:
        assert row.sent is not None
        row.sent *= 1.05
    assert (
        "did not keep up" in failed(judge(observed(found), schedule(), "natural"))["achieved rate"]
    )


def test_rate_is_not_the_clients_fault_where_the_limit_held_sends_back() -> None:
    found = rows()
    for row in found:
        row.planned /= 3
    assert not failed(judge(observed(found), schedule(), "natural"))


def test_dispatch_lag_fires() -> None:
    found = rows()
    assert found[7].sent is not None
    found[7].sent += 0.05
    gates = judge(observed(found), schedule(), "natural")
    assert "bottleneck" in failed(gates)["dispatch lag"]


def test_event_loop_lag_fires() -> None:
    seen = replace(observed(rows()), loop_lags=[0.001] * 190 + [0.03] * 10)
    assert list(failed(judge(seen, schedule(), "natural"))) == ["event-loop lag"]


def test_tokens_fire_without_usage() -> None:
    found = rows()
    found[0].completion_tokens = None
    assert failed(judge(observed(found), schedule(), "natural")) == {
        "token reconciliation": "the server sent no usage with 1 of 20 answers"
    }


def test_tokens_fire_when_chunks_do_not_add_up() -> None:
    found = rows()
    for row in found:
        row.chunk_tokens = [1, 1, 1, 2]
    reason = failed(judge(observed(found), schedule(), "natural"))["token reconciliation"]
    assert reason == "100 tokens in chunks, 80 by usage"


def test_tokens_fire_on_more_chunks_than_tokens() -> None:
    found = rows()
    for row in found:
        row.completion_tokens = row.expected_output_tokens = 3
        row.chunk_tokens = []
    assert (
        "more chunks"
        in failed(judge(observed(found), schedule(), "natural"))["token reconciliation"]
    )


def test_tokens_are_unchecked_where_only_totals_are_known() -> None:
    found = rows()
    for row in found:
        row.chunk_times, row.chunk_tokens = row.chunk_times[:2], []
    assert (
        verdicts(judge(observed(found), schedule(), "natural"))["token reconciliation"]
        == "unchecked"
    )


@pytest.mark.parametrize("given", [3, 5])
def test_output_length_fires_on_another_length(given: int) -> None:
    found = rows()
    found[4].completion_tokens = given
    found[4].chunk_tokens = [1] * 3 + [given - 3] if given > 3 else [1, 1, 1]
    found[4].chunk_times = found[4].chunk_times[: len(found[4].chunk_tokens)]
    gates = judge(observed(found), schedule(), "natural")
    assert "1 of 20 answers off" in failed(gates)["output length"]


def test_output_length_is_unchecked_where_the_server_may_stop() -> None:
    found = rows()
    for row in found:
        row.expected_output_tokens = None
    assert verdicts(judge(observed(found), schedule(), "natural"))["output length"] == "unchecked"


def test_cold_fires_on_cached_tokens_in_usage() -> None:
    found = rows()
    found[3].cached_tokens = 8
    assert "8 cached tokens" in failed(judge(observed(found), schedule(), "cold"))["cache label"]


def test_cold_fires_on_hit_counters() -> None:
    scrapes = [Scrape(-1.0, "before", {HITS: 100.0}), Scrape(3.0, "after", {HITS: 164.0})]
    seen = replace(observed(rows()), scrapes=scrapes)
    assert "64 cached tokens" in failed(judge(seen, schedule(), "cold"))["cache label"]


def test_cold_allows_what_the_schedule_itself_shares() -> None:
    found = rows(2)
    found[1].cached_tokens = 2
    assert not failed(judge(observed(found), schedule([[1, 2, 3], [1, 2, 4]]), "cold"))


def test_cold_text_with_hits_is_unchecked() -> None:
    found = rows(2)
    found[1].cached_tokens = 2
    gates = judge(observed(found), schedule(["a", "b"]), "cold")
    assert verdicts(gates)["cache label"] == "unchecked"


def test_warm_fires_without_hits() -> None:
    assert list(failed(judge(observed(rows()), schedule(), "warm"))) == ["cache label"]


def test_a_label_without_evidence_is_unchecked() -> None:
    found = rows()
    for row in found:
        row.cached_tokens = None
    assert verdicts(judge(observed(found), schedule(), "cold"))["cache label"] == "unchecked"


def test_a_closed_loop_has_no_rate_of_its_own() -> None:
    gates = judge(observed(rows()), schedule(closed=True), "natural")
    assert verdicts(gates)["achieved rate"] == "unchecked"
