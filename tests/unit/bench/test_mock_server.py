"""The mock over a real socket: its bytes, its ends, its counters and its record of what it did."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import msgspec
import pytest
from raw_http import RawAnswer, ask

from poise.bench.mock_profiles import PROFILES
from poise.bench.mock_schedule import MockProfile, MockSchedule
from poise.bench.mock_server import MockServer, Served
from poise.errors import ConfigError

QUICK: dict[str, Any] = {"first_token_s": 0.002, "gap_s": [0.001]}


def run(
    test: Callable[[MockServer], Awaitable[None]], profile: MockProfile | None = None
) -> MockServer:
    async def inside() -> MockServer:
        async with MockServer(profile) as mock:
            await asyncio.wait_for(test(mock), 60)
        return mock

    return asyncio.run(inside())


def completion(**parts: Any) -> dict[str, Any]:
    return {"model": "mock", "prompt": [1, 2, 3], "max_tokens": 4, "stream": True} | parts


def one(**mock_parts: Any) -> tuple[RawAnswer, Served]:
    found: list[RawAnswer] = []

    async def test(mock: MockServer) -> None:
        found.append(await ask(mock.url, "/v1/completions", completion(mock=QUICK | mock_parts)))

    served = run(test).served[0]
    return found[0], served


def test_a_stream_is_what_the_schedule_says() -> None:
    raw, served = one()
    assert raw.status == 200
    assert "text/event-stream" in raw.head
    assert [event["choices"][0]["text"] for event in raw.data[:-1]] == [" t0", " t1", " t2", " t3"]
    assert raw.data[-1] == "[DONE]"
    assert raw.http_chunks[-1] == b""
    assert served.outcome == "done"
    assert [event.num_tokens for event in served.events] == [1, 1, 1, 1, 0]


def test_no_write_is_early_and_lateness_does_not_add_up() -> None:
    _, served = one(num_tokens=30)
    planned = [event.planned - served.admitted for event in served.events[:30]]
    assert planned == pytest.approx([0.002 + 0.001 * n for n in range(30)])
    assert all(event.written >= event.planned for event in served.events)
    assert [e.written for e in served.events] == sorted(e.written for e in served.events)


def test_a_client_on_this_machine_sees_each_event_after_it_was_written() -> None:
    async def test(mock: MockServer) -> None:
        before = perf_counter()
        await ask(mock.url, "/v1/completions", completion(mock=QUICK))
        after = perf_counter()
        served = mock.served[0]
        assert before <= served.arrived <= served.events[0].written
        assert served.events[-1].written <= after

    run(test)


@pytest.mark.parametrize(
    ("end", "ended", "last_chunk"),
    [("no_done", "closed", True), ("cut", "closed", False), ("reset", "reset", False)],
)
def test_early_ends_differ_on_the_wire(end: str, ended: str, last_chunk: bool) -> None:
    raw, served = one(end=end, end_after_chunks=2, gap_s=[0.02])
    assert raw.ended == ended
    assert len([event for event in raw.data if event != "[DONE]"]) == 2
    assert (raw.http_chunks[-1] == b"") is last_chunk
    assert served.outcome == end
    assert sum(event.num_tokens for event in served.events) == 2
    assert served.completion_tokens == 4


def test_an_error_event_comes_after_200() -> None:
    raw, _ = one(end="error_event", end_after_chunks=1)
    assert raw.status == 200
    assert raw.data[-1]["error"]["code"] == 500


def test_a_stalled_stream_lasts_until_the_client_leaves() -> None:
    async def test(mock: MockServer) -> None:
        body = completion(mock=QUICK | {"end": "stall", "end_after_chunks": 1})
        raw = await ask(mock.url, "/v1/completions", body, stop_after=2)
        assert len(raw.data) == 1
        while mock.served[0].finished is None:
            await asyncio.sleep(0.001)
        assert mock.served[0].outcome == "stall"

    run(test)


def test_a_client_that_leaves_is_written_down() -> None:
    async def test(mock: MockServer) -> None:
        body = completion(mock={"first_token_s": 0.001, "gap_s": [0.02]})
        await ask(mock.url, "/v1/completions", body, stop_after=1)
        while mock.served[0].finished is None:
            await asyncio.sleep(0.001)
        assert mock.served[0].outcome == "client left"
        assert b'finished_reason="abort",model_name="mock"} 1.0' in mock.metrics.page()

    run(test)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_status_comes_with_an_error_body(status: int) -> None:
    raw, served = one(status=status)
    assert raw.status == status
    assert raw.json["error"]["code"] == status
    assert ("Retry-After" in raw.head) is (status != 500)
    assert served.outcome == f"status {status}"


def test_answers_that_are_not_streams() -> None:
    raw, served = one(answer="json")
    assert raw.json["choices"][0]["text"] == " t0 t1 t2 t3"
    assert raw.json["usage"]["completion_tokens"] == 4
    assert [event.kind for event in served.events] == ["answer"]
    raw, _ = one(answer="html")
    assert "text/html" in raw.head


def test_bytes_are_cut_as_asked() -> None:
    raw, served = one(piece_bytes=3, token_text=" é🙂", line_end="\r\n")
    assert all(len(chunk) <= 3 for chunk in raw.http_chunks)
    text = "".join(event["choices"][0]["text"] for event in raw.data[:-1])
    assert text == " é🙂0 é🙂1 é🙂2 é🙂3" == "".join(event.text for event in served.events)
    assert b"\r\n\r\n" in raw.body


def test_several_events_in_one_write_are_written_at_one_instant() -> None:
    raw, served = one(events_per_write=5)
    assert len(raw.http_chunks) == 2
    assert len({event.written for event in served.events}) == 1


def test_chat_reasoning_and_roles() -> None:
    async def test(mock: MockServer) -> None:
        body = {
            "messages": [{"role": "user", "content": "say something"}],
            "max_completion_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "mock": QUICK | {"role_at_s": 0.001, "num_reasoning_tokens": 2},
        }
        raw = await ask(mock.url, "/v1/chat/completions", body)
        deltas = [event["choices"][0]["delta"] for event in raw.data[:-2]]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[1:] == [
            {"reasoning_content": " t0"},
            {"reasoning_content": " t1"},
            {"content": " t2"},
        ]
        assert raw.data[-2]["choices"] == []
        assert raw.data[-2]["usage"]["completion_tokens"] == 3

    run(test)


def test_one_slot_makes_a_queue_in_order_of_arrival() -> None:
    schedule = MockSchedule(first_token_s=0.01, gap_s=(0.0,), num_tokens=1)

    async def test(mock: MockServer) -> None:
        asking = [ask(mock.url, "/v1/completions", completion()) for _ in range(4)]
        await asyncio.gather(*asking)

    served = list(run(test, MockProfile(schedules=(schedule,), slots=1)).served)
    for earlier, later in pairwise(served):
        assert earlier.finished is not None
        assert later.admitted >= earlier.finished


def test_schedules_go_round() -> None:
    statuses = []

    async def test(mock: MockServer) -> None:
        for _ in range(8):
            raw = await ask(mock.url, "/v1/completions", completion(mock={"first_token_s": 0}))
            statuses.append(raw.status)

    run(test, PROFILES["flaky"])
    assert statuses == [200, 200, 200, 503] * 2


def test_counters_follow_from_what_was_served() -> None:
    prompt = list(range(40))

    async def test(mock: MockServer) -> None:
        for _ in range(2):
            await ask(mock.url, "/v1/completions", completion(prompt=prompt, mock=QUICK))
        page = (await ask(mock.url, "/metrics")).body.decode()
        labels = '{engine="0",model_name="mock"}'
        for line in (
            f"vllm:prompt_tokens_total{labels} 80.0",
            f"vllm:generation_tokens_total{labels} 8.0",
            f"vllm:prefix_cache_queries_total{labels} 80.0",
            f"vllm:prefix_cache_hits_total{labels} 32.0",
            f"vllm:num_requests_running{labels} 0.0",
            f"vllm:num_requests_waiting{labels} 0.0",
        ):
            assert line in page.splitlines()

    served = list(run(test, MockProfile(prefix_cache=True)).served)
    assert [item.cached_tokens for item in served] == [0, 32]


def test_hits_can_be_set() -> None:
    mock = run_with({"cached_tokens": 2})
    assert mock.served[0].cached_tokens == 2
    assert mock.metrics.cached_tokens == 2


def run_with(parts: dict[str, Any]) -> MockServer:
    async def test(mock: MockServer) -> None:
        await ask(mock.url, "/v1/completions", completion(mock=QUICK | parts))

    return run(test)


def test_what_was_done_can_be_read_and_forgotten() -> None:
    async def test(mock: MockServer) -> None:
        await ask(mock.url, "/v1/completions", completion(mock=QUICK))
        raw = await ask(mock.url, "/mock/served")
        assert msgspec.convert(raw.json, list[Served]) == list(mock.served)
        await ask(mock.url, "/mock/reset", {})
        assert (await ask(mock.url, "/mock/served")).json == []

    run(test)


def test_pages() -> None:
    async def test(mock: MockServer) -> None:
        assert (await ask(mock.url, "/health")).status == 200
        assert (await ask(mock.url, "/v1/models")).json["data"][0]["id"] == "mock"
        assert (await ask(mock.url, "/nothing")).status == 404
        assert (await ask(mock.url, "/metrics")).status == 404

    run(test, MockProfile(metrics=False))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (completion(mock={"first_tokn_s": 1}), "first_tokn_s"),
        (completion(mock={"gap_s": []}), "gap_s"),
        (completion(mock={"end": "explode"}), "end"),
        (completion(mock=[1]), "object"),
        (completion(max_tokens=-1), "max_tokens"),
        (completion(prompt=None), "prompt"),
        (completion(mock={"num_reasoning_tokens": 2}), "chat"),
    ],
)
def test_a_wrong_request_is_a_400_that_says_why(body: object, message: str) -> None:
    async def test(mock: MockServer) -> None:
        raw = await ask(mock.url, "/v1/completions", body)
        assert raw.status == 400
        assert message in raw.json["error"]["message"]
        assert not mock.served

    run(test)


def test_a_taken_port_is_a_clear_line() -> None:
    async def test(mock: MockServer) -> None:
        with pytest.raises(ConfigError, match=f"port {mock.port} .*--port"):
            await MockServer(port=mock.port).start()

    run(test)
