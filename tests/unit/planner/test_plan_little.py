"""Little's law from two or three numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.errors import ConfigError
from poise.planner.little import plan

positive = st.floats(1e-3, 1e6)


@settings(deadline=None)
@given(positive, positive)
def test_any_two_give_the_third(rate: float, latency: float) -> None:
    forward = plan(rate=rate, latency=latency)
    in_flight = forward.value("concurrency")
    assert in_flight == pytest.approx(rate * latency)
    assert plan(concurrency=in_flight, latency=latency).value("rate") == pytest.approx(rate)
    assert plan(concurrency=in_flight, rate=rate).value("latency") == pytest.approx(latency)


def test_three_are_checked_against_each_other() -> None:
    report = plan(concurrency="12", rate="5", latency="2")
    assert report.value("by_law") == 10
    assert report.value("difference") == pytest.approx(-100 / 6)


def test_tokens_follow_from_the_rate() -> None:
    assert plan(rate=5, latency=2, output_tokens=100).value("output_throughput") == 500


def test_it_says_what_it_cannot_tell() -> None:
    assert any("percentile" in note for note in plan(rate=5, latency=2).notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give two of"),
        ({"rate": 1}, "give two of"),
        ({"rate": "0", "latency": 1}, "--rate is '0'"),
        ({"rate": 1, "latency": "-1"}, "--latency is '-1'"),
        ({"concurrency": "nan", "latency": 1}, "--concurrency is 'nan'"),
        ({"concurrency": "1e30", "latency": 1}, "--concurrency is '1e30'"),
        ({"rate": 1, "latency": 1, "output_tokens": "0"}, "--output-tokens is '0'"),
    ],
)
def test_nonsense_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**given)  # type: ignore[arg-type]
