"""Stop strings against a naive scan of the whole text, however it is split."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from poise.engine.stop_strings import StopChecker, StopMatch


def naive(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Reads character by character; the first end of the text that is a stop string, the longest such, ends it."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def run(parts: list[str], stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    checker = StopChecker(stops, include_stop)
    shown = ""
    for part in parts:
        result = checker.feed(part)
        if isinstance(result, StopMatch):
            return shown + result.text, result.stop
        shown += result
    return shown + checker.flush(), None


SHORT = st.text(alphabet="ab\u00e9", max_size=5)


@settings(deadline=None)
@given(
    parts=st.lists(SHORT, max_size=8),
    stops=st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=4),
    include_stop=st.booleans(),
)
def test_equals_a_naive_scan_for_any_split(
    parts: list[str], stops: list[str], include_stop: bool
) -> None:
    assert run(parts, stops, include_stop) == naive("".join(parts), stops, include_stop)


@settings(deadline=None)
@given(
    parts=st.lists(SHORT, max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_only_beginnings_of_stops_are_held(parts: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops, include_stop=False)
    fed = shown = ""
    for part in parts:
        result = checker.feed(part)
        if isinstance(result, StopMatch):
            return
        fed, shown = fed + part, shown + result
        held = fed[len(shown) :]
        assert fed.startswith(shown)
        assert not held or any(stop != held and stop.startswith(held) for stop in stops)


def test_a_stop_across_pieces_never_leaks() -> None:
    checker = StopChecker(["DEFGHIJ"], include_stop=False)
    assert [checker.feed(text) for text in ("AB", "CD", "EFG", "HI")] == ["AB", "C", "", ""]
    assert checker.feed("JK") == StopMatch("", "DEFGHIJ")


def test_a_false_alarm_is_released_once() -> None:
    checker = StopChecker(["\n\nUser", "\n\n#"], include_stop=False)
    assert checker.feed("a\n\n") == "a"
    assert checker.feed("b") == "\n\nb"
    assert checker.feed("\n") == ""
    assert checker.flush() == "\n"
    assert checker.flush() == ""


def test_the_stop_string_is_kept_on_demand() -> None:
    assert StopChecker(["b"], include_stop=True).feed("abc") == StopMatch("ab", "b")
    assert StopChecker(["b"], include_stop=False).feed("abc") == StopMatch("a", "b")


def test_the_first_complete_stop_wins() -> None:
    assert StopChecker(["abcd", "bc"], include_stop=False).feed("abcd") == StopMatch("a", "bc")
    assert StopChecker(["bc", "abc"], include_stop=False).feed("abc") == StopMatch("", "abc")
