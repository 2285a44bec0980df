"""The right figures and the mistaken ones, on requests served at exactly known times; and vLLM's result held against them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poise.bench import conformance
from poise.bench.adapters import read_vllm_result, score_vllm_result
from poise.bench.mock_server import Served, ServedEvent
from poise.bench.record import RecordError


def served(
    *events: tuple[str, float, int], outcome: str = "done", arrived: float = 100.0
) -> Served:
    """A request whose events are (kind, seconds after arrival, tokens)."""
    found = [ServedEvent(k, n, arrived + at, arrived + at) for k, at, n in events]  # type: ignore[arg-type]
    tokens = sum(n for _, _, n in events)
    return Served(
        index=0,
        answer_id="mock-0",
        stream=True,
        arrived=arrived,
        admitted=arrived,
        prompt_tokens=3,
        cached_tokens=0,
        max_tokens=16,
        completion_tokens=tokens if outcome == "done" else 16,
        events=found,
        finished=found[-1].written,
        outcome=outcome,
    )


BUNDLED = served(
    ("role", 0.005, 0),
    ("content", 0.2, 1),
    ("content", 0.3, 4),
    ("content", 0.5, 2),
    ("done", 0.5, 0),
)
CUT = served(("content", 0.1, 1), ("content", 0.2, 1), outcome="cut")
REASONED = served(("reasoning", 0.1, 2), ("content", 0.4, 1), ("done", 0.4, 0))
ONE = served(("content", 0.1, 1), ("done", 0.1, 0))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (conformance.time_to_first_token, [0.2]),
        (conformance.time_to_first_event, [0.005]),
        (conformance.end_to_end, [0.5]),
        (conformance.chunk_gaps, [0.1, 0.2]),
        (conformance.intervals_with_zeros, [0.1, 0, 0, 0, 0.2, 0]),
        (conformance.token_intervals, [0.025] * 4 + [0.1] * 2),
        (conformance.gaps_with_first, [0.2, 0.1, 0.2]),
        (conformance.time_per_output_token, [0.3 / 6]),
        (conformance.time_per_token_with_first, [0.5 / 7]),
        (conformance.time_per_chunk, [0.15]),
    ],
)
def test_each_definition_on_chunks_of_1_4_2(
    samples: conformance.Samples, expected: list[float]
) -> None:
    assert samples(BUNDLED) == pytest.approx(expected)


def test_intervals_add_up_to_the_chunk_gaps() -> None:
    for one in (BUNDLED, REASONED, ONE):
        assert sum(conformance.token_intervals(one)) == pytest.approx(
            sum(conformance.chunk_gaps(one))
        )
        assert len(conformance.intervals_with_zeros(one)) == one.completion_tokens - 1


def test_what_is_not_defined_has_no_value() -> None:
    assert conformance.time_per_output_token(ONE) == []
    assert conformance.end_to_end(CUT) == []
    assert conformance.time_per_output_token(CUT) == []
    assert conformance.end_at_any_price(CUT) == pytest.approx([0.2])
    assert conformance.time_to_first_answer(served(("reasoning", 0.1, 1))) == []
    assert conformance.time_to_first_answer(REASONED) == pytest.approx([0.4])


def test_a_mistaken_definition_is_named() -> None:
    found = conformance.compare_statistic("ttft", "mean", 0.0052, [BUNDLED])
    assert not found.agrees
    assert found.definition == "first event of any kind"
    assert found.difference == pytest.approx(-0.1948)
    assert conformance.compare_statistic("ttft", "p99", 0.2009, [BUNDLED]).agrees
    assert conformance.compare_statistic("ttft", "p99", 0.25, [BUNDLED]).definition.startswith(
        "none"
    )


def test_null_agrees_with_null_only() -> None:
    assert conformance.compare_statistic("tpot", "mean", None, [ONE]).agrees
    zero = conformance.compare_statistic("tpot", "mean", 0.0, [ONE])
    assert not zero.agrees
    assert zero.definition == "a value where none is defined"
    assert not conformance.compare_statistic("tpot", "mean", None, [BUNDLED]).agrees


def vllm_result(**changes: Any) -> dict[str, Any]:
    """As vLLM would report BUNDLED asked once: it stamps the role chunk and takes chunks for tokens."""
    return {
        "date": "20261130-061800",
        "num_prompts": 1,
        "request_rate": "inf",
        "duration": 0.5,
        "completed": 1,
        "failed": 0,
        "total_input_tokens": 3,
        "total_output_tokens": 7,
        "request_throughput": 2.0,
        "output_throughput": 14.0,
        "mean_ttft_ms": 5.0,
        "p99_itl_ms": 199.0,
        "mean_itl_ms": 150.0,
        "mean_tpot_ms": 50.0,
        "errors": [""],
    } | changes


def test_vllms_result_is_scored_figure_by_figure(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(vllm_result()))
    readiness_probe = served(("content", 9.0, 1), ("done", 9.0, 0))
    scores = score_vllm_result(read_vllm_result(path), [readiness_probe, BUNDLED])
    verdicts = {score.figure: (score.agrees, score.definition) for score in scores}
    assert verdicts == {
        "completed requests": (True, ""),
        "output tokens": (True, ""),
        "request throughput": (True, ""),
        "output throughput": (True, ""),
        "mean ttft": (False, "first event of any kind"),
        "mean itl": (False, "gap between chunks"),
        "p99 itl": (False, "gap between chunks, gaps with TTFT among them"),
        "mean tpot": (True, "(end − first token) / (tokens − 1)"),
        "e2el": (False, "not reported"),
    }


def test_a_cut_stream_counted_as_completed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(vllm_result(num_prompts=2, completed=2, total_output_tokens=9)))
    scores = score_vllm_result(read_vllm_result(path), [BUNDLED, CUT])
    wrong = {score.figure for score in scores if not score.agrees}
    assert {"completed requests", "output tokens"} <= wrong


def test_the_last_of_appended_results_counts(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(vllm_result(duration=9)) + "\n" + json.dumps(vllm_result()))
    assert read_vllm_result(path).duration == 0.5
    path.write_text(json.dumps(vllm_result(), indent=2))
    assert read_vllm_result(path).figures_ms["mean_ttft_ms"] == 5.0


@pytest.mark.parametrize("content", ["", "[]", "{", '{"duration": 1}', '{"duration": "long"}'])
def test_another_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=r"other\.json: not a result"):
        read_vllm_result(path)


def test_a_mock_that_forgot_is_no_judge(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(vllm_result(num_prompts=3)))
    with pytest.raises(RecordError, match="remembers 1"):
        score_vllm_result(read_vllm_result(path), [BUNDLED])
