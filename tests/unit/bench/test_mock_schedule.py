"""Schedules as data: events, times, tokens and bytes, for any schedule."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.bench import mock_schedule as plans
from poise.bench.mock_profiles import PROFILES, load_profile
from poise.bench.mock_schedule import MockRequest, MockSchedule
from poise.errors import ConfigError

COMPLETION = MockRequest(
    chat=False,
    stream=True,
    max_tokens=4,
    include_usage=True,
    continuous_usage=False,
    prompt=(1, 2, 3),
)
CHAT = MockRequest(
    chat=True,
    stream=True,
    max_tokens=4,
    include_usage=True,
    continuous_usage=False,
    prompt=("a", "b"),
)


def events(request: MockRequest = COMPLETION, **parts: object) -> list[plans.Event]:
    return plans.timeline(msgspec.convert(parts, MockSchedule), request, "id")


def test_times_count_from_the_beginning_and_gaps_repeat() -> None:
    found = events(first_token_s=0.1, gap_s=[0.01, 0.2])
    times = [event.at_s for event in found if event.num_tokens]
    assert times == pytest.approx([0.1, 0.11, 0.31, 0.32])
    assert [event.kind for event in found] == ["content"] * 4 + ["usage", "done"]
    assert found[-3].data["choices"][0]["finish_reason"] == "length"


def test_uncached_prompt_tokens_delay_the_first() -> None:
    assert events(first_token_s=0.1, uncached_token_s=0.01)[0].at_s == pytest.approx(0.13)
    assert events(first_token_s=0.1, uncached_token_s=0.01, cached_tokens=2)[
        0
    ].at_s == pytest.approx(0.11)


def test_a_chunk_never_mixes_reasoning_and_answer() -> None:
    found = events(CHAT, num_reasoning_tokens=3, tokens_per_chunk=[2])
    assert [(e.kind, e.num_tokens) for e in found[:3]] == [
        ("reasoning", 2),
        ("reasoning", 1),
        ("content", 1),
    ]
    deltas = [e.data["choices"][0]["delta"] for e in found[:3]]
    assert deltas == [
        {"reasoning_content": " t0 t1"},
        {"reasoning_content": " t2"},
        {"content": " t3"},
    ]


def test_role_and_empty_chunks_come_before_the_first_token() -> None:
    found = events(CHAT, role_at_s=0.02, num_empty_chunks=2, first_token_s=0.05)
    assert [(e.kind, round(e.at_s, 9)) for e in found[:4]] == [
        ("role", 0.02),
        ("empty", 0.03),
        ("empty", 0.04),
        ("content", 0.05),
    ]


def test_usage_where_it_is_asked_for_or_not() -> None:
    def reported(request: MockRequest = COMPLETION, **parts: object) -> list[int]:
        found = events(request, **parts)
        return [
            e.data["usage"]["completion_tokens"]
            for e in found
            if isinstance(e.data, dict) and "usage" in e.data
        ]

    assert reported() == [4]
    assert reported(usage="missing") == []
    assert reported(usage="continuous", tokens_per_chunk=[3]) == [3, 4, 4]
    assert reported(usage="finish_chunk", finish="own_chunk") == [4]
    last = events(usage="finish_chunk", finish="own_chunk")[-2]
    assert last.data["choices"]
    assert last.data["usage"]


@pytest.mark.parametrize("end", ["cut", "reset", "stall", "no_done", "error_event"])
def test_an_early_end_has_neither_finish_reason_nor_done(end: str) -> None:
    found = events(end=end, end_after_chunks=2)
    kinds = [event.kind for event in found]
    assert kinds == ["content", "content"] + ["error"] * (end == "error_event")
    assert all(e.data["choices"][0]["finish_reason"] is None for e in found[:2])


def test_heartbeats_keep_their_own_times() -> None:
    found = events(heartbeat_s=0.03, first_token_s=0.1, gap_s=[0])
    assert [round(e.at_s, 9) for e in found if e.kind == "comment"] == [0.03, 0.06, 0.09]


def test_a_completion_can_show_neither_role_nor_reasoning() -> None:
    for parts in ({"role_at_s": 0.0}, {"num_reasoning_tokens": 1}):
        with pytest.raises(plans.ScheduleMismatch, match="chat"):
            plans.check(msgspec.convert(parts, MockSchedule), COMPLETION)


def test_no_tokens_still_finish() -> None:
    found = events(num_tokens=0, first_token_s=0.2)
    assert [(e.kind, e.at_s) for e in found] == [("finish", 0.2), ("usage", 0.2), ("done", 0.2)]
    assert found[0].data["choices"][0]["finish_reason"] == "stop"


SCHEDULES = st.builds(
    MockSchedule,
    num_tokens=st.integers(0, 12),
    tokens_per_chunk=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    gap_s=st.lists(st.floats(0, 1), min_size=1, max_size=3).map(tuple),
    num_reasoning_tokens=st.integers(0, 5),
    num_empty_chunks=st.integers(0, 2),
    usage=st.sampled_from(["asked", "missing", "continuous", "finish_chunk"]),
    finish=st.sampled_from(["last_token", "own_chunk"]),
    token_text=st.sampled_from([" t", " é🙂"]),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    events_per_write=st.integers(1, 4),
    piece_bytes=st.none() | st.integers(1, 40),
    heartbeat_s=st.none() | st.floats(0.05, 1),
)


@given(SCHEDULES)
def test_any_schedule_sends_all_tokens_once_in_order(schedule: MockSchedule) -> None:
    found = plans.timeline(schedule, CHAT, "id")
    assert sum(e.num_tokens for e in found) == schedule.num_tokens
    text = "".join(f"{schedule.token_text}{n}" for n in range(schedule.num_tokens or 0))
    assert "".join(e.text for e in found) == text
    assert plans.whole_answer(schedule, CHAT, "id").text == text
    assert [e.at_s for e in found] == sorted(e.at_s for e in found)
    assert found[-1].data == "[DONE]"


@given(SCHEDULES)
def test_framing_changes_neither_events_nor_their_bytes(schedule: MockSchedule) -> None:
    found = plans.timeline(schedule, CHAT, "id")
    sent = list(plans.writes(schedule, found))
    assert [e for write in sent for e in write.completes] == found
    payload = b"".join(write.payload for write in sent)
    assert payload == b"".join(plans.event_bytes(schedule, e) for e in found)
    if schedule.piece_bytes:
        assert all(0 < len(write.payload) <= schedule.piece_bytes for write in sent)
    lines = [line[6:] for line in payload.decode().splitlines() if line.startswith("data: ")]
    assert [json.loads(line) for line in lines[:-1]] == [
        e.data for e in found if isinstance(e.data, dict)
    ]


def test_pieces_cut_through_characters() -> None:
    found = events(token_text="🙂", piece_bytes=1)
    pieces = [write.payload for write in plans.writes(MockSchedule(piece_bytes=1), found)]
    assert "🙂".encode() in b"".join(pieces)
    assert max(map(len, pieces)) == 1


@pytest.mark.parametrize("name", PROFILES)
def test_every_named_profile_says_what_it_does(name: str) -> None:
    profile = load_profile(name)
    assert profile.description
    for schedule in profile.schedules:
        assert list(plans.writes(schedule, plans.timeline(schedule, CHAT, "id")))


def test_profiles_come_from_files(tmp_path: Path) -> None:

    toml = tmp_path / "p.toml"
    toml.write_text("slots = 2\n[[schedules]]\nfirst_token_s = 0.3\n[[schedules]]\nstatus = 429\n")
    profile = load_profile(str(toml))
    assert profile.slots == 2
    assert [s.status for s in profile.schedules] == [200, 429]
    as_json = tmp_path / "p.json"
    as_json.write_bytes(msgspec.json.encode(profile))
    assert load_profile(str(as_json)) == profile


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("slots = ", "Invalid value"),
        ("slotz = 2", "slotz"),
        ("[[schedules]]\nfirst_token_s = -1", "first_token_s"),
        ("[[schedules]]\ngap_s = []", "gap_s"),
        ("schedules = []", "schedules"),
    ],
)
def test_a_wrong_profile_is_one_clear_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_profile(str(path))


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="steady"):
        load_profile("steadi")
    with pytest.raises(ConfigError, match="No such file"):
        load_profile("missing.toml")
