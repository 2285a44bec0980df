"""What speculative decoding buys: expected tokens, speed-up, break-even, best k; and why a draft can't just be believed.

Knows probabilities and relative costs, no models. Formulas: Leviathan, Kalman and Matias, "Fast Inference from Transformers via
Speculative Decoding" (2023), section 3, with acceptances independent and alike. Costs are in plain steps: 1 is one step
without speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from poise.core.step_time import StepShape, StepTimeModel
from poise.errors import ConfigError
from poise.planner.inputs import between, distribution, positive, whole
from poise.planner.report import Column, Report, Table, Unit

LARGEST_K = 64
SHOWN_K = 8


class StepCosts(Protocol):
    """What a step with k drafts for each request costs, in plain steps; 1 without any."""

    def of_step(self, k: int) -> float: ...

    def in_words(self, k: int) -> str:
        """The equation of a step with k drafts, k at least 1."""
        ...

    @property
    def draft(self) -> float:
        """Of that, each drafted token's."""
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """In plain steps: each drafted token, the verifying step, and what each drafted token adds to that step."""

    draft: float = 0.0
    verify: float = 1.0
    verify_per_token: float = 0.0

    def of_step(self, k: int) -> float:
        """A step with k drafted tokens; without any it is a plain step."""
        return 1.0 if k == 0 else k * self.draft + self.verify + k * self.verify_per_token

    def in_words(self, k: int) -> str:
        return (
            f"k·draft + verify + k·per token = {k}·{self.draft:g} + {self.verify:g} + "
            f"{k}·{self.verify_per_token:g}"
        )


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """From seconds of steps: `seconds[k]` of a batch in which each request verifies k drafts."""

    seconds: Sequence[float]
    draft: float = 0.0

    def of_step(self, k: int) -> float:
        return k * self.draft + self.seconds[k] / self.seconds[0]

    def in_words(self, k: int) -> str:
        return (
            f"k·draft + step with k drafts / plain step = {k}·{self.draft:g} + "
            f"{1e3 * self.seconds[k]:.3g} ms / {1e3 * self.seconds[0]:.3g} ms"
        )


def measured_costs(
    times: StepTimeModel, batch: int, context: int, draft: float = 0.0
) -> MeasuredCosts:
    """Of `batch` requests, each with `context` tokens, as an engine's own step times predict."""

    def seconds(k: int) -> float:
        rows = batch * (k + 1)
        return times.predict(StepShape(rows, 0, batch * times.keys(context, k + 1), rows))

    return MeasuredCosts([seconds(k) for k in range(LARGEST_K + 1)], draft)


def expected_tokens(acceptance: float, k: int) -> float:
    """(1 − a^(k+1)) / (1 − a): the accepted prefix of k drafts and the token that the step draws itself."""
    return sum(acceptance**i for i in range(k + 1))


def operations(acceptance: float, k: int, draft: float = 0.0) -> float:
    """Arithmetic for each token, relative to none drafted; `draft`: of a drafted token, relative to the target's.

    Section 3.4: (1 − a)(γĉ + γ + 1) / (1 − a^(γ+1)).
    """
    return (k * draft + k + 1) / expected_tokens(acceptance, k)


def speedup(acceptance: float, k: int, costs: StepCosts) -> float:
    return expected_tokens(acceptance, k) / costs.of_step(k)


def break_even(k: int, costs: StepCosts) -> float | None:
    """The acceptance at which k drafts neither gain nor lose; None where even certain acceptance loses, and without drafts."""
    cost = costs.of_step(k)
    if k == 0 or cost > k + 1:
        return None
    low, high = 0.0, 1.0
    if expected_tokens(low, k) >= cost:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(middle, k) >= cost else (middle, high)
    return high


def best_k(acceptance: float, costs: StepCosts, largest: int = LARGEST_K) -> int:
    """The k of the largest speed-up, 0 (off) where nothing gains; the smaller of equals."""
    return max(range(largest + 1), key=lambda k: (speedup(acceptance, k, costs), -k))


def plan(
    *,
    acceptance: object = None,
    k: object = None,
    draft_cost: object = 0.0,
    verify_cost: object = 1.0,
    verify_cost_per_token: object = 0.0,
    p: object = None,
    q: object = None,
    step_times: StepTimeModel | None = None,
    batch: object = 1,
    context: object = 256,
) -> Report:
    """The report. `p` and `q`: probabilities of the target's and the draft's next token.

    `step_times`, as an engine measured them, say what verifying costs a batch of `batch` requests of `context`
    tokens, instead of `verify_cost` and `verify_cost_per_token`.
    """
    report = Report("speculation", "Speculative decoding")
    if (p is None) != (q is None):
        raise ConfigError("--p and --q belong together: the target's and the draft's probabilities")
    mass = None
    if p is not None:
        mass = _distributions(report, distribution("--p", p), distribution("--q", q))
    if acceptance is None and mass is None:
        raise ConfigError("give --acceptance, or --p and --q from which it follows")
    a = mass if acceptance is None else between("--acceptance", acceptance, 0, 1)
    assert a is not None
    draft = between("--draft-cost", draft_cost, 0, 1e6)
    costs: StepCosts = Costs(
        draft,
        positive("--verify-cost", verify_cost, 1e6),
        between("--verify-cost-per-token", verify_cost_per_token, 0, 1e6),
    )
    if step_times is not None:
        if costs != Costs(draft):
            raise ConfigError("--verify-cost and --verify-cost-per-token are measured with --model")
        rows = whole("--batch", batch, 1, 4096)
        costs = measured_costs(step_times, rows, whole("--context", context, 1), draft)
    best = best_k(a, costs)
    chosen = best if k is None else whole("--k", k, 0, LARGEST_K)
    report.title = f"Speculative decoding, {chosen} drafted tokens a step"
    _chosen(report, a, chosen, costs, "--acceptance" if acceptance is not None else "Σ min(p, q)")
    best_speedup = speedup(a, best, costs)
    report.add(
        "best_k", "best k", best, Unit.TOKENS_PER_STEP,
        f"the k from 0 to {LARGEST_K} with the largest speed-up; 0 is off",
    )  # fmt: skip
    report.add(
        "best_speedup", "speed-up at best k", best_speedup, Unit.TIMES,
        f"tokens({best}) / cost({best})",
    )  # fmt: skip
    _table(report, a, costs, best)
    if costs.of_step(LARGEST_K) == costs.of_step(1):
        report.notes.append(
            "Drafts are taken as free, so more always seem better: give --draft-cost and --verify-cost-per-token."
        )
    report.notes += [
        "Assumes that each draft is accepted with the same probability, whatever came before, and that nothing waits.",
        "A step's cost grows with the batch: in a full batch verifying k + 1 rows can cost near k + 1 plain steps. Give that cost.",
    ]
    return report


def _chosen(report: Report, a: float, k: int, costs: StepCosts, source: str) -> None:
    tokens, cost = expected_tokens(a, k), costs.of_step(k)
    report.add("acceptance", "acceptance", 100 * a, Unit.PERCENT, source)
    report.add(
        "expected_tokens", "expected tokens", tokens, Unit.TOKENS_PER_STEP,
        f"(1 − a^(k+1)) / (1 − a), a = {a:g}, k = {k}",
    )  # fmt: skip
    report.add(
        "step_cost", "cost of a step", cost, Unit.PLAIN_STEPS,
        costs.in_words(k) if k else "a plain step",
    )  # fmt: skip
    report.add("speedup", "speed-up", tokens / cost, Unit.TIMES, "expected tokens / cost of a step")
    report.add(
        "operations", "arithmetic per token", operations(a, k, costs.draft), Unit.TIMES,
        "(k·draft + k + 1) / expected tokens, a draft's arithmetic taken for its cost",
    )  # fmt: skip
    even = break_even(k, costs)
    report.add(
        "break_even_acceptance", "break-even acceptance", None if even is None else 100 * even,
        Unit.PERCENT,
        "the a at which expected tokens = cost of a step" if even is not None
        else f"even k + 1 = {k + 1} tokens are worth less than {cost:g} plain steps" if k
        else "nothing is drafted",
    )  # fmt: skip


def _table(report: Report, a: float, costs: StepCosts, best: int) -> None:
    shown = sorted({*range(SHOWN_K + 1), best})
    rows = []
    for k in shown:
        even = break_even(k, costs)
        rows.append(
            [
                k,
                expected_tokens(a, k),
                costs.of_step(k),
                speedup(a, k, costs),
                None if even is None else 100 * even,
            ]
        )
    columns = [
        Column("k", "k", Unit.TOKENS_PER_STEP),
        Column("expected_tokens", "expected", Unit.TOKENS_PER_STEP),
        Column("step_cost", "cost", Unit.PLAIN_STEPS),
        Column("speedup", "speed-up", Unit.TIMES),
        Column("break_even_acceptance", "break-even", Unit.PERCENT),
    ]
    report.tables.append(
        Table("by_k", "By k (—: no acceptance breaks even)", columns, rows, "as above, for each k")
    )


def _distributions(report: Report, p: list[float], q: list[float]) -> float:
    """Adds accepted mass and residual; returns the mass."""
    if len(p) != len(q):
        raise ConfigError(f"--p has {len(p)} entries, --q has {len(q)}: one for each token in both")
    kept = [min(a, b) for a, b in zip(p, q, strict=True)]
    mass = min(1.0, sum(kept))
    surplus = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    total = sum(surplus)
    residual = [value / total if total > 0 else 0.0 for value in surplus]
    emitted = [k + (1 - mass) * r for k, r in zip(kept, residual, strict=True)]
    report.add(
        "accepted_mass", "accepted mass", 100 * mass, Unit.PERCENT,
        "Σ min(p, q) = " + " + ".join(f"{value:g}" for value in kept),
    )  # fmt: skip
    report.add(
        "accept_all_error", "wrong if all drafts are accepted", 100 * (1 - mass), Unit.PERCENT,
        "total variation distance ½ Σ |p − q| = 1 − accepted mass: the answer then follows q, not p",
    )  # fmt: skip
    names = ("p", "q", "accepted", "residual", "emitted", "accept_all")
    labels = ("p", "q", "min(p, q)", "residual", "emitted", "accept all")
    columns = [Column(n, label, Unit.PROBABILITY) for n, label in zip(names, labels, strict=True)]
    rows = list(zip(p, q, kept, residual, emitted, q, strict=True))
    report.tables.append(
        Table(
            "distributions", "Each token of the vocabulary", columns, rows,
            "residual = max(p − q, 0) / Σ max(p − q, 0); emitted = min(p, q) + (1 − mass) · residual = p",
        )
    )  # fmt: skip
    return mass
