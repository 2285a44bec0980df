"""Speed-up claims together: bounds that hold for every arrangement of shares."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.errors import ConfigError
from poise.planner.compose import (
    Claim,
    greatest_speedup,
    in_sequence,
    least_speedup,
    parse_claim,
    plan,
    product,
)

WORKED = ["4x", "40%", "2x", "1.5x"]


def test_the_worked_claims_do_not_make_24() -> None:
    report = plan(WORKED, claimed="24x")
    assert report.value("product") == pytest.approx(20)
    assert report.value("least") == 1
    assert report.value("greatest") == pytest.approx(20)
    assert report.value("verdict").startswith("no: more than 20×")
    assert any("No share is given for 4x, 40%, 2x, 1.5x" in note for note in report.notes)


def test_with_shares_the_interval_narrows() -> None:
    report = plan(["4x@0.6", "40%@0.25", "2x@50%", "1.5x@0.3"], claimed=24)
    assert report.value("least") == pytest.approx(1 / (1 - 0.75 * 0.6))
    assert report.value("greatest") < 10
    assert report.value("verdict").startswith("no")
    assert not any("No share" in note for note in report.notes)


def test_one_claim_is_amdahls_law() -> None:
    report = plan(["4x@0.6"])
    assert report.value("least") == pytest.approx(1 / (0.4 + 0.6 / 4))
    assert report.value("greatest") == pytest.approx(1 / (0.4 + 0.6 / 4))
    [row] = report.tables[0].rows
    assert row[3] == pytest.approx(1 / 0.55)
    assert row[4] == pytest.approx(2.5)


def test_savings_in_sequence_multiply_what_is_left() -> None:
    assert plan(["40%", "40%"], sequential=True).value("speedup") == pytest.approx(1 / 0.36)
    assert plan(WORKED, sequential=True, claimed=24).value("verdict").startswith("no")


def test_claims_on_everything_make_their_product_at_most_and_the_best_at_least() -> None:
    claims = [Claim("", 4, 1.0), Claim("", 2, 1.0)]
    assert least_speedup(claims) == pytest.approx(4)
    assert greatest_speedup(claims) == pytest.approx(8)


claims = st.lists(
    st.builds(Claim, st.just("claim"), st.floats(1, 50), st.floats(0, 1)), min_size=1, max_size=5
)


@settings(deadline=None)
@given(claims, st.data())
def test_every_arrangement_lies_in_the_interval(found: list[Claim], data: st.DataObject) -> None:
    """Lays each claim on random parts of 40 slices of the time; overlaps multiply or only the best counts."""
    slices = 40
    touched = [data.draw(st.sets(st.integers(0, slices - 1), max_size=slices)) for _ in found]
    exact = [Claim("", c.speedup, len(t) / slices) for c, t in zip(found, touched, strict=True)]
    best = multiplied = 0.0
    for index in range(slices):
        here = [c.speedup for c, t in zip(exact, touched, strict=True) if index in t]
        best += 1 / max([1.0, *here]) / slices
        multiplied += 1 / math.prod(here) / slices
    tolerance = 1 + 1e-9
    assert least_speedup(exact) <= 1 / best * tolerance
    assert 1 / multiplied <= greatest_speedup(exact) * tolerance


@settings(deadline=None)
@given(claims)
def test_the_interval_is_ordered_and_below_the_product(found: list[Claim]) -> None:
    tolerance = 1 + 1e-9
    assert least_speedup(found) * tolerance >= 1
    assert least_speedup(found) <= greatest_speedup(found) * tolerance
    assert greatest_speedup(found) <= product(found) * tolerance
    assert in_sequence(found) <= product(found) * tolerance
    unknown = [Claim("", claim.speedup, None) for claim in found]
    assert least_speedup(unknown) <= least_speedup(found) * tolerance
    assert greatest_speedup(found) <= greatest_speedup(unknown) * tolerance


@pytest.mark.parametrize(
    ("text", "speedup", "share"),
    [
        ("4x", 4, None),
        ("4×", 4, None),
        ("1.5x@0.3", 1.5, 0.3),
        ("40%", 1 / 0.6, None),
        ("40%@25%", 1 / 0.6, 0.25),
        ("1x@1", 1, 1),
    ],
)
def test_claims_are_read(text: str, speedup: float, share: float | None) -> None:
    claim = parse_claim(text)
    assert claim.speedup == pytest.approx(speedup)
    assert claim.share == share


@pytest.mark.parametrize(
    "text",
    ["4", "x", "0x", "-2x", "0.5x", "nanx", "infx", "1e9x", "100%", "-5%", "4x@2", "4x@", "4x@-1", "4x@nan"],
)  # fmt: skip
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_claim(text)


def test_no_claims_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one claim"):
        plan([])
