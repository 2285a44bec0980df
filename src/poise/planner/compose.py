"""What several speed-up claims make together: an interval, not their product.

Knows claims and shares of time, not systems. A claim "s× on share f" removes r = 1 − 1/s of the time that it touches, a part f
of the whole (Amdahl 1967). Where claims touch the same time, each may remove its part of what the others left, or they remove
the same thing; the interval holds both, and all overlaps that the shares allow. Claims that hurt each other are outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poise.errors import ConfigError
from poise.planner.inputs import between, positive
from poise.planner.report import Column, Report, Table, Unit

LARGEST_SPEEDUP = 1e6


@dataclass(frozen=True, slots=True)
class Claim:
    """`speedup` ≥ 1 on `share` of the time, None where nobody said which."""

    text: str
    speedup: float
    share: float | None

    @property
    def removed(self) -> float:
        """The part that it removes of the time it touches."""
        return 1 - 1 / self.speedup

    @property
    def most(self) -> float:
        """The largest share that it may touch."""
        return 1.0 if self.share is None else self.share

    @property
    def least(self) -> float:
        return 0.0 if self.share is None else self.share


def parse_claim(text: str) -> Claim:
    """4x, 40%, 4x@0.3, 40%@30%: a speed-up or a saving, and the share of the time it was measured on."""
    body, at, share_text = text.strip().replace("×", "x").partition("@")
    share = None
    if at:
        percent = share_text.endswith("%")
        value = between(f"the share of {text!r}", share_text.rstrip("%"), 0, 100 if percent else 1)
        share = value / 100 if percent else value
    if body.endswith("%"):
        saving = between(f"the saving of {text!r}", body[:-1], 0, 100)
        if saving == 100:
            raise ConfigError(f"{text!r} saves everything: expected a saving below 100%")
        return Claim(text, 1 / (1 - saving / 100), share)
    if not body.endswith("x"):
        raise ConfigError(f"{text!r} is not a claim: expected 4x, 40%, or either with @SHARE")
    speedup = positive(f"the speed-up of {text!r}", body[:-1], LARGEST_SPEEDUP)
    if speedup < 1:
        raise ConfigError(f"{text!r} is a slow-down; a claim here is 1x or more")
    return Claim(text, speedup, share)


def product(claims: Sequence[Claim]) -> float:
    return math.prod(claim.speedup for claim in claims)


def least_speedup(claims: Sequence[Claim]) -> float:
    """Shares nested in each other, and of claims that touch the same time only the best counts.

    The time then removed is ∫ max r = Σ (rᵢ − rᵢ₊₁) · max(f₁ … fᵢ), r descending: the least of all overlaps.
    """
    ordered = sorted(claims, key=lambda claim: claim.removed, reverse=True)
    removed, widest = 0.0, 0.0
    for claim, following in zip(ordered, [*ordered[1:], None], strict=True):
        widest = max(widest, claim.least)
        removed += (claim.removed - (following.removed if following else 0.0)) * widest
    return 1 / (1 - removed)


def greatest_speedup(claims: Sequence[Claim]) -> float:
    """No better than removing disjoint parts, 1 / (1 − Σ f·r), and no better than Π s^f.

    Disjoint is best where the shares have room beside each other. Where they must overlap, the time left is at
    least Π s^(−f), by Jensen's inequality on exp(−Σ ln s of the claims at an instant).
    """
    disjoint = 1 - sum(claim.most * claim.removed for claim in claims)
    together = math.exp(-math.fsum(claim.most * math.log(claim.speedup) for claim in claims))
    return 1 / max(disjoint, together)


def in_sequence(claims: Sequence[Claim]) -> float:
    """Each measured with those before it at work: what is left multiplies."""
    return 1 / math.prod(1 - claim.most * claim.removed for claim in claims)


def plan(texts: Sequence[str], *, sequential: bool = False, claimed: object = None) -> Report:
    """The report on claims such as ["4x@0.6", "40%"]. `claimed`: a total to judge, as 24 or "24x"."""
    claims = [parse_claim(text) for text in texts]
    if not claims:
        raise ConfigError(
            "give at least one claim, such as 4x@0.6 (4 times faster on 60% of the time)"
        )
    report = Report("compose", f"{len(claims)} claims together")
    report.add(
        "product", "all claims multiplied", product(claims), Unit.TIMES,
        " · ".join(f"{claim.speedup:g}" for claim in claims),
    )  # fmt: skip
    if sequential:
        low = high = in_sequence(claims)
        why = "Π 1 / (1 − f·(1 − 1/s)), f the share of the time left by the claims before, 1 if not given"
        report.add("speedup", "in sequence", low, Unit.TIMES, why)
    else:
        low, high = least_speedup(claims), greatest_speedup(claims)
        report.add(
            "least", "together, at least", low, Unit.TIMES,
            "1 / (1 − Σ (rᵢ − rᵢ₊₁) · max(f₁ … fᵢ)), r = 1 − 1/s descending: the same time, the best counts",
        )  # fmt: skip
        report.add(
            "greatest", "together, at most", high, Unit.TIMES,
            "1 / max(1 − Σ f·r, Π s^(−f)): disjoint times, or each removes of what others left",
        )  # fmt: skip
    if claimed is not None:
        _judge(report, claimed, low, high)
    report.tables.append(_alone(claims))
    missing = [claim.text for claim in claims if claim.share is None]
    if missing and not sequential:
        report.notes.append(
            f"No share is given for {', '.join(missing)}: it is taken as anything from 0 to 1. Say which part of the "
            f"time each was measured on, as in {missing[0]}@0.3, and the interval narrows."
        )
    report.notes += [
        "A share is a part of the time before any claim." if not sequential
        else "Holds if each was measured end to end, on one workload, with those before it switched on.",
        "Ignored: claims that hurt each other (a full batch leaves speculation nothing), other workloads, other baselines.",
    ]  # fmt: skip
    return report


def _judge(report: Report, claimed: object, low: float, high: float) -> None:
    text = claimed.replace("×", "x").removesuffix("x") if isinstance(claimed, str) else claimed
    total = positive("--claimed", text, LARGEST_SPEEDUP**2)
    if total > high * (1 + 1e-9):
        verdict = f"no: more than {high:.4g}×, the most they can make"
    elif total < low * (1 - 1e-9):
        verdict = f"less than {low:.4g}×, the least they make"
    else:
        verdict = "possible, not proved: inside the interval"
    report.add("claimed", "claimed in total", total, Unit.TIMES, "as given")
    report.add("verdict", "do they make it?", verdict, Unit.WORD, "claimed against the interval")


def _alone(claims: Sequence[Claim]) -> Table:
    columns = [
        Column("claim", "claim", Unit.WORD),
        Column("speedup", "on its share", Unit.TIMES),
        Column("share", "share", Unit.PERCENT),
        Column("alone", "of the whole", Unit.TIMES),
        Column("limit", "limit", Unit.TIMES),
    ]
    rows: list[list[float | str | None]] = []
    for claim in claims:
        share = claim.share
        rows.append(
            [
                claim.text,
                claim.speedup,
                None if share is None else 100 * share,
                None if share is None else 1 / (1 - share * claim.removed),
                None if share is None or share == 1 else 1 / (1 - share),
            ]
        )
    return Table(
        "alone", "Each claim alone (—: no share given, or no limit)", columns, rows,
        "of the whole = 1 / (1 − f + f/s); limit = 1 / (1 − f), s without end",
    )  # fmt: skip
