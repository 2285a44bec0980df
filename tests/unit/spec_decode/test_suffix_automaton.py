"""The automaton of a growing text against a search through it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poise.spec_decode.suffix_automaton import SuffixAutomaton

texts = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 9), max_size=60),
    st.builds(
        lambda unit, n: unit * n,
        st.lists(st.integers(0, 3), min_size=1, max_size=5),
        st.integers(1, 12),
    ),
)


def longest_repeat(text: list[int]) -> int:
    """Of the suffixes that end somewhere before the last token, too."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[start : start + length] == suffix for start in range(len(text) - length)):
            return length
    return 0


@given(texts, st.integers(1, 6))
def test_the_longest_repeat_is_found_at_every_length_of_the_text(text, most):
    automaton = SuffixAutomaton()
    for size, token in enumerate(text, start=1):
        automaton.extend([token])
        known = text[:size]
        length, end = automaton.longest_repeat()
        assert length == longest_repeat(known)
        if length:
            assert length - 1 <= end < size - 1
            assert known[end + 1 - length : end + 1] == known[-length:]
        bounded, end = automaton.longest_repeat(most)
        assert bounded == min(length, most)
        if bounded:
            assert bounded - 1 <= end < size - 1
            assert known[end + 1 - bounded : end + 1] == known[-bounded:]


def test_the_latest_occurrence_of_a_repeat_is_preferred():
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 7, 1, 2, 8, 1, 2])
    length, end = automaton.longest_repeat()
    assert (length, end) == (2, 4)
    assert list(automaton.continuation(end, 3)) == [8, 1, 2]


def test_a_periodic_text_goes_on_past_its_end():
    automaton = SuffixAutomaton()
    automaton.extend([5, 6, 7, 5, 6, 7, 5, 6])
    _, end = automaton.longest_repeat()
    assert list(automaton.continuation(end, 7)) == [7, 5, 6, 7, 5, 6, 7]
    automaton = SuffixAutomaton()
    automaton.extend([4, 4])
    assert list(automaton.continuation(automaton.longest_repeat()[1], 5)) == [4] * 5


@given(texts)
def test_it_is_linear_in_the_text(text):
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton._links) <= max(2, 2 * len(text))
