"""The event parser against a naive one that sees the whole stream at once, under every cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.bench.sse import EventParser


def naive(stream: bytes) -> list[bytes]:
    """All events with data of a whole stream."""
    text = stream.removeprefix(b"\xef\xbb\xbf")
    events: list[bytes] = []
    data: list[bytes] = []
    for line in re.split(rb"\r\n|\r|\n", text):
        name, colon, value = line.partition(b":")
        if line == b"":
            if data:
                events.append(b"\n".join(data))
            data = []
        elif name == b"data":
            data.append(value.removeprefix(b" ") if colon else b"")
    return events + ([b"\n".join(data)] if data else [])


def parse(reads: list[bytes]) -> list[bytes]:
    parser = EventParser()
    found = [event for read in reads for event in parser.feed(read)]
    return found + parser.finish()


ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
lines = st.one_of(
    st.sampled_from([b"", b"data", b"data:", b"data: {}", b": ping", b"event: x", b"id: 1", b":"]),
    st.text("aé😀:{} ", max_size=6).map(lambda text: b"data:" + text.encode()),
    st.text("aé😀:{} ", max_size=6).map(lambda text: text.encode()),
)
streams = st.lists(st.tuples(lines, ends), max_size=14).map(
    lambda pairs: b"".join(line + end for line, end in pairs)
)


@given(streams, st.booleans(), st.lists(st.integers(0, 120), max_size=12))
def test_cuts_do_not_change_the_events(stream: bytes, mark: bool, cuts: list[int]) -> None:
    stream = b"\xef\xbb\xbf" * mark + stream
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reads = [stream[a:b] for a, b in zip(places, places[1:])]  # noqa: RUF007
    if mark and reads and len(reads[0]) < 3:
        reads = [b"".join(reads)]
    assert parse(reads) == naive(stream)


@given(streams)
def test_one_byte_at_a_time(stream: bytes) -> None:
    assert parse([bytes([byte]) for byte in stream]) == naive(stream)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_come_out_with_the_read_that_ends_them(end: bytes) -> None:
    parser = EventParser()
    assert parser.feed(b"data: a" + end) == []
    assert parser.feed(end) == [b"a"]
    assert parser.feed(b"data: b" + end + end) == [b"b"]
    assert parser.finish() == []


def test_data_lines_are_joined_and_comments_left_out() -> None:
    assert parse([b": hello\n\ndata: 1\n: inside\ndata: 2\n\n"]) == [b"1\n2"]


def test_an_event_without_its_blank_line_is_not_lost() -> None:
    assert parse([b"data: 1\n\ndata: [DONE]"]) == [b"1", b"[DONE]"]
