"""Pairs alternate A B B A, carry equal loads, never answer one block from the other's cache, and keep what was measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from poise.bench.client import Target
from poise.bench.compare import Pair
from poise.bench.paired_runs import (
    BlockStoppedError,
    Comparison,
    judge,
    read_comparison,
    run_pairs,
    salted,
    values,
    write_comparison,
)
from poise.bench.record import (
    ClientOptions,
    Distribution,
    Figure,
    Gate,
    Percentile,
    RecordError,
    RunRecord,
    ServerInfo,
    WindowSummary,
)
from poise.bench.schedule import PlannedRequest, Schedule
from poise.bench.workloads import preset_schedule

A, B = (Target(f"http://127.0.0.1:{port}", "/v1/completions", "m") for port in (1, 2))


def record(target: Target, schedule: Schedule, **changes: object) -> RunRecord:
    """A run as the runner would give it: 100 tok/s on A, 50 on B."""
    rate = 100.0 if target.base_url == A.base_url else 50.0
    p50 = Percentile(50.0, 0.2, 0.1, 0.3, 0.95, 1)
    window = WindowSummary(
        0.0,
        1.0,
        3,
        {"ttft": Distribution("", "s", 3, 0.25, 0.1, 0.4, [p50])},
        {"output_throughput": Figure("", "tok/s", rate)},
    )
    made = RunRecord(
        "", target.info(), schedule.info(), ClientOptions(), {}, 1.0, {"full": window}, "", [], True
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def run(
    a: Target, b: Target, count: int, **changes: object
) -> tuple[list[Pair], list[tuple[Target, Schedule]]]:
    """The pairs of a run against servers that answer at once, and what was sent to whom."""
    sent: list[tuple[Target, Schedule]] = []
    pairs: list[Pair] = []

    async def block(target: Target, schedule: Schedule) -> RunRecord:
        sent.append((target, schedule))
        return record(target, schedule, **changes)

    schedules = (preset_schedule("W2", seed) for seed in range(count))
    asyncio.run(run_pairs(a, b, schedules, block, into=pairs, report=lambda line: None))
    return pairs, sent


def test_the_order_turns_round_and_both_get_the_same_load() -> None:
    pairs, sent = run(A, B, 4)
    assert [target for target, _ in sent] == [A, B, B, A, A, B, B, A]
    digests = [schedule.sha256 for _, schedule in sent]
    assert digests[::2] == digests[1::2]
    assert len(set(digests)) == 4
    assert [pair.seed for pair in pairs] == [0, 1, 2, 3]
    assert [pair.first for pair in pairs] == ["A", "B", "A", "B"]
    for pair in pairs:
        assert pair.a == {"output_throughput": 100.0, "ttft_mean": 0.25, "ttft_p50": 0.2}
        assert pair.b["output_throughput"] == 50.0


def prompts(schedule: Schedule) -> Sequence[list[int]]:
    return [r.prompt for r in schedule.requests]  # type: ignore[misc]


def test_one_server_gets_other_tokens_the_second_time() -> None:
    _, sent = run(A, A, 2)
    for (_, first), (_, second) in zip(sent[::2], sent[1::2], strict=True):
        for one, other in zip(prompts(first), prompts(second), strict=True):
            assert len(one) == len(other)
            assert one[0] != other[0]


def test_salt_keeps_lengths_prefixes_arrivals_and_warm_ups_apart() -> None:
    plain = preset_schedule("W4", 1)
    other = salted(plain)
    assert {tuple(p[:1024]) for p in prompts(other)} != {tuple(p[:1024]) for p in prompts(plain)}
    assert len({tuple(p[:1024]) for p in prompts(other)}) == 1
    assert len({tuple(p) for p in prompts(other)}) == 32
    low, high = plain.workload["token_range"]
    assert all(low <= number < high for prompt in prompts(other) for number in prompt)
    assert other.warmups[0].prompt != plain.warmups[0].prompt
    open_load = preset_schedule("W6", 1)
    assert [r.at for r in salted(open_load).requests] == [r.at for r in open_load.requests]
    assert salted(open_load).arrivals == open_load.arrivals


def test_texts_are_salted_in_front() -> None:
    messages = [{"role": "user", "content": "hello"}]
    plain = Schedule("chat", 7, {}, {}, [PlannedRequest("hello", 1), PlannedRequest(messages, 1)])
    text, chat = (request.prompt for request in salted(plain).requests)
    assert isinstance(text, str)
    assert text.endswith(" hello")
    assert chat == [{"role": "user", "content": text}]
    assert messages[0]["content"] == "hello"


def test_a_block_that_failed_a_gate_leaves_its_pair_out_and_the_comparison_invalid() -> None:
    gate = Gate("dispatch lag", "fail", "late")
    pairs, _ = run(A, B, 8, gates=[gate], valid=False)
    assert pairs[0].failures == ["A dispatch lag: late", "B dispatch lag: late"]
    comparison = Comparison("", A.info(), B.info(), {}, {}, 1, {}, pairs=pairs)
    judge(comparison)
    judge(comparison)
    assert not comparison.valid
    assert comparison.reasons[0] == "pair 1: A dispatch lag: late"
    assert len(comparison.reasons) == 16
    assert {result.num_left_out for result in comparison.results} == {8}
    assert {result.verdict for result in comparison.results} == {"undecided"}


def test_a_block_that_stopped_ends_the_comparison() -> None:
    with pytest.raises(BlockStoppedError, match=r"pair 1, .*: the server is gone"):
        run(A, B, 3, stopped="the server is gone", valid=False)


def test_metrics_that_a_load_does_not_have_are_not_judged() -> None:
    pairs, _ = run(A, B, 6)
    comparison = Comparison("", A.info(), B.info(), {}, {}, 1, {}, pairs=pairs, null_pairs=pairs)
    judge(comparison)
    assert [result.metric for result in comparison.results] == ["output_throughput", "ttft_p50"]


def test_every_figure_and_percentile_is_kept() -> None:
    kept = values(record(A, preset_schedule("W2", 1)))
    assert kept == {"output_throughput": 100.0, "ttft_mean": 0.25, "ttft_p50": 0.2}


def test_a_comparison_is_read_as_it_was_written(tmp_path: Path) -> None:
    pairs, _ = run(A, B, 6)
    info = ServerInfo("a", "http://127.0.0.1:1", "/v1/completions", "m")
    comparison = Comparison("", info, info, {}, {}, 1, {}, pairs=pairs, null_pairs=pairs)
    judge(comparison)
    write_comparison(comparison, tmp_path / "c.json")
    again = read_comparison(tmp_path / "c.json")
    assert again == comparison
    judge(again)
    assert again == comparison


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a comparison"),
        ('{"schema": "x"}', "not a comparison"),
        (None, "not a comparison"),
    ],
)
def test_a_file_that_is_no_comparison(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecordError, match=message):
        read_comparison(path)
