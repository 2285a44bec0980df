"""Static against continuous batching, driven through the engine's scheduler."""

from __future__ import annotations

import heapq
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.errors import ConfigError
from poise.planner import gantt
from poise.planner.schedule import continuous, plan, static, timelines

WORKED = [5, 20, 10, 15, 10]


def test_the_worked_numbers() -> None:
    by_batch, as_they_come = timelines("5,20,10,15,10", "3")
    assert by_batch.iterations == 35
    assert as_they_come.iterations == 20
    report = plan(by_batch, as_they_come)
    assert report.value("static_iterations") == 35
    assert report.value("continuous_iterations") == 20
    assert report.value("ratio") == 1.75
    assert report.value("continuous_use") == 100
    assert any("Unit steps" in note and "no prefill" in note for note in report.notes)


def test_equal_lengths_gain_nothing() -> None:
    by_batch, as_they_come = timelines([5] * 6, 3)
    assert (by_batch.iterations, as_they_come.iterations) == (10, 10)


def test_no_requests_take_no_iterations() -> None:
    by_batch, as_they_come = timelines("", 3)
    assert (by_batch.iterations, as_they_come.iterations) == (0, 0)
    report = plan(by_batch, as_they_come)
    assert report.value("ratio") is None
    assert gantt.terminal([by_batch, as_they_come]) == []
    ElementTree.fromstring(gantt.picture([by_batch, as_they_come]).text())


@pytest.mark.parametrize(
    ("lengths", "slots", "message"),
    [
        ("5,20", "0", "--slots is '0'"),
        ("5,20", "-3", "--slots is '-3'"),
        ("5,20", "1.5", "--slots is '1.5'"),
        ("5,20", "nan", "--slots is 'nan'"),
        ("5,0", "3", "--lengths is '0'"),
        ("5,-1", "3", "--lengths is '-1'"),
        ("5,,1", "3", "--lengths is ''"),
        ("5,inf", "3", "--lengths is 'inf'"),
        ("1000000", "3", "sum to 1,000,000 tokens: at most 200,000"),
        ([1] * 10_001, 3, "has 10,001 entries: at most 10,000"),
    ],
)
def test_nonsense_is_refused(lengths: object, slots: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        timelines(lengths, slots)


cases = given(st.lists(st.integers(1, 30), max_size=25), st.integers(1, 6))


@settings(deadline=None)
@cases
def test_continuous_is_list_scheduling(lengths: list[int], slots: int) -> None:
    """An independent model: a heap of the instants at which slots become free."""
    free = [0] * slots
    ends = []
    for length in lengths:
        end = heapq.heappop(free) + length
        heapq.heappush(free, end)
        ends.append(end)
    assert [run.end for run in continuous(lengths, slots).runs] == ends


@settings(deadline=None)
@cases
def test_static_takes_the_longest_of_each_batch(lengths: list[int], slots: int) -> None:
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    timeline = static(lengths, slots)
    assert timeline.iterations == sum(map(max, batches))
    assert timeline.busy == sum(lengths)


@settings(deadline=None)
@cases
def test_slots_are_never_shared_and_continuous_never_loses(lengths: list[int], slots: int) -> None:
    by_batch, as_they_come = static(lengths, slots), continuous(lengths, slots)
    assert as_they_come.iterations <= by_batch.iterations
    for timeline in (by_batch, as_they_come):
        taken = [(run.slot, i) for run in timeline.runs for i in range(run.start, run.released)]
        assert len(taken) == len(set(taken))
        assert all(0 <= run.slot < slots for run in timeline.runs)


def test_the_picture_in_the_terminal() -> None:
    assert gantt.terminal(timelines(WORKED, 3)) == [
        "  static, 35 iterations",
        "  slot 1 |AAAAA···············DDDDDDDDDDDDDDD|",
        "  slot 2 |BBBBBBBBBBBBBBBBBBBBEEEEEEEEEE·····|",
        "  slot 3 |CCCCCCCCCC··········               |",
        "  continuous, 20 iterations",
        "  slot 1 |AAAAADDDDDDDDDDDDDDD|",
        "  slot 2 |BBBBBBBBBBBBBBBBBBBB|",
        "  slot 3 |CCCCCCCCCCEEEEEEEEEE|",
        "  letters: requests; ·: a slot that its batch holds; blank: free",
    ]


def test_a_long_schedule_still_fits_a_terminal() -> None:
    lines = gantt.terminal(timelines([1000, 400], 100))
    assert max(map(len, lines)) < 100
    assert "a column is 13 iterations" in lines[-1]


def test_the_svg_is_well_formed_and_names_both_counts() -> None:
    root = ElementTree.fromstring(gantt.picture(timelines(WORKED, 3)).text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "static: 35 iterations" in texts
    assert "continuous: 20 iterations" in texts
