"""How many drafts each request verifies in a step: what gives the whole batch most tokens per second.

Knows how often drafts were accepted and what a step is predicted to take; neither tokens nor who drafts. Since
`coupled` acceptance changes no byte whatever the length, a length is a matter of speed alone. Invariant: a request whose
drafts do not pay gets none, but for a probe once in a while.

    S_j  survival: the probability that draft j of a step becomes a token, the product of a_0 … a_j
    a_j  the share of drafts at place j, all before them accepted, that were accepted; decayed counts and a prior
    m    1 + Σ S_j, the tokens that a request is expected to get out of the step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from poise.core.step_time import StepShape
from poise.spec_decode.drafter import Candidate

DECAY: Final = 0.95  # of a request's counts, per step of its own with drafts
COMMON_DECAY: Final = 0.995
PRIOR_WEIGHT: Final = 1.0  # steps that the prior counts as
FIRST_GUESS: Final = 0.6  # share accepted, where nothing was drafted yet
LEAST_GAIN: Final = 1.1
"""What drafts must promise over none: a prediction may err by as much, and looking drafts up takes time that no step shows."""
PROBE_DRAFTS: Final = 2
LEAST_WAIT: Final = 16  # steps of a request without drafts between two probes
PROBE_SHARE: Final = 0.01  # of all time that probes may be expected to lose
FIRST_PROBE: Final = 0.3
"""Steps of a request that its first probe may be expected to lose, of all requests together."""


class StepTimes(Protocol):
    """What `core.step_time.StepTimeModel` offers."""

    def predict(self, shape: StepShape) -> float: ...

    def keys(self, start: int, num_tokens: int) -> int: ...


DraftSeconds = Callable[[Sequence[int]], float]
"""Seconds that the executor takes to draft, given the lengths it drafts: those of model proposers."""


@dataclass(slots=True)
class Counts:
    """Decayed numbers of drafts at one place that were tried, all before them accepted, and of these accepted."""

    tried: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: bool, decay: float) -> None:
        self.tried = self.tried * decay + 1
        self.accepted = self.accepted * decay + accepted

    def share(self, prior: float) -> float:
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


@dataclass(slots=True)
class Record:
    """What one request's drafts came to, by place; and for how many steps it has had none (None: it never had any)."""

    places: list[Counts] = field(default_factory=list)
    num_steps_off: int | None = None

    def survivals(self, most: int, prior: float) -> list[float]:
        """S_0 … S_(most − 1). A place that was never tried is taken to be like the one before."""
        survivals: list[float] = []
        survival, share = 1.0, prior
        for place in range(most):
            if place < len(self.places):
                share = self.places[place].share(share)
            survival *= share
            survivals.append(survival)
        return survivals

    def add(self, num_drafts: int, num_accepted: int) -> None:
        num_tried = min(num_drafts, num_accepted + 1)
        self.places += [Counts() for _ in range(num_tried - len(self.places))]
        for place in range(num_tried):
            self.places[place].add(place < num_accepted, DECAY)


@dataclass(slots=True)
class Forecast:
    """Sums over steps with drafts: tokens that drafts were expected to become, and that they became."""

    num_expected: float = 0.0
    num_accepted: int = 0
    num_requests: int = 0  # a request counts once for each step in which it drafts

    @property
    def error(self) -> float:
        """Of the predicted m, relative to what came."""
        came = self.num_requests + self.num_accepted
        return (self.num_requests + self.num_expected) / came - 1 if came else 0.0


class DraftLengthController:
    """Chooses draft lengths step by step and learns from what became of them."""

    def __init__(self, draft_seconds: DraftSeconds | None = None) -> None:
        self._draft_seconds = draft_seconds
        self._records: dict[int, Record] = {}
        self._common = {True: Counts(), False: Counts()}  # by who drafts
        self._pending: dict[int, tuple[list[float], bool]] = {}
        self.forecast = Forecast()

    # --- choosing ---------------------------------------------------------------------------------

    def choose(
        self, candidates: Sequence[Candidate], shape: StepShape, step_time: StepTimes
    ) -> list[int]:
        """0 … most for each candidate. `shape` is the step without any of their drafts."""
        survivals = [self._survivals(candidate) for candidate in candidates]
        lengths = best_lengths(candidates, survivals, shape, step_time, self._draft_seconds)
        probed = self._due(candidates, lengths)
        if probed is not None:
            seconds = Seconds(candidates, shape, step_time, self._draft_seconds)
            trial = list(lengths)
            trial[probed] = min(PROBE_DRAFTS, candidates[probed].most)
            loss = seconds.loss(lengths, trial, survivals) * max(shape.num_sampled, 1)
            waited = self._records[candidates[probed].request_id].num_steps_off
            if loss <= (FIRST_PROBE if waited is None else waited * PROBE_SHARE):
                lengths = trial
        for i, candidate in enumerate(candidates):
            record = self._records[candidate.request_id]
            record.num_steps_off = 0 if lengths[i] else (record.num_steps_off or 0) + 1
            if lengths[i]:
                self._pending[candidate.request_id] = (
                    survivals[i],
                    candidate.is_drafted_by_executor,
                )
        return lengths

    def _survivals(self, candidate: Candidate) -> list[float]:
        record = self._records.setdefault(candidate.request_id, Record())
        common = self._common[candidate.is_drafted_by_executor]
        return record.survivals(candidate.most, common.share(FIRST_GUESS))

    def _due(self, candidates: Sequence[Candidate], lengths: Sequence[int]) -> int | None:
        """Who might be probed in this step: one who never had drafts, else the one who has been without for longest."""
        longest, due = LEAST_WAIT - 1, None
        for i, candidate in enumerate(candidates):
            if lengths[i] == 0:
                waited = self._records[candidate.request_id].num_steps_off
                if waited is None:
                    return i
                if waited > longest:
                    longest, due = waited, i
        return due

    # --- learning ---------------------------------------------------------------------------------

    def observe(self, request_id: int, num_drafts: int, num_accepted: int) -> None:
        """What became of a request's drafts in the step that was chosen for last."""
        survivals, by_executor = self._pending.pop(request_id)
        self.forecast.num_expected += sum(survivals[:num_drafts])
        self.forecast.num_accepted += num_accepted
        self.forecast.num_requests += 1
        self._records[request_id].add(num_drafts, num_accepted)
        for place in range(min(num_drafts, num_accepted + 1)):
            self._common[by_executor].add(place < num_accepted, COMMON_DECAY)

    def forget(self, request_id: int) -> None:
        self._records.pop(request_id, None)
        self._pending.pop(request_id, None)


# --- the choice itself ----------------------------------------------------------------------------


def best_lengths(
    candidates: Sequence[Candidate],
    survivals: Sequence[Sequence[float]],
    shape: StepShape,
    step_time: StepTimes,
    draft_seconds: DraftSeconds | None = None,
) -> list[int]:
    """The lengths of most expected tokens per second: drafts are added in the order of their survival, which is the order of gain
    where rows cost alike, and the best stop on the way is taken, if it is worth leaving the start. Whatever steps the cost takes on that way
    (tiles, a first draft of the executor), the best stop is found, as long as more rows never take less time.
    """
    lengths = [0] * len(candidates)
    seconds = Seconds(candidates, shape, step_time, draft_seconds)
    taken = seconds.of(lengths)
    num_expected = float(max(shape.num_sampled, 1))
    most = LEAST_GAIN * num_expected / taken
    num_left = sum(map(sum, survivals))  # tokens that drafts not yet added are expected to become
    if num_expected + num_left <= most * taken:
        return lengths
    order = sorted(
        ((s, i) for i, values in enumerate(survivals) for s in values),
        key=lambda entry: -entry[0],
    )
    best = 0
    for place, (survival, i) in enumerate(order, 1):
        if num_expected + num_left <= most * taken:  # not even if the others cost nothing
            break
        lengths[i] += 1
        seconds.add_row(i, lengths[i])
        taken = seconds.of(lengths)
        num_expected += survival
        num_left -= survival
        if num_expected > most * taken:
            most, best = num_expected / taken, place
    chosen = Counter(i for _, i in order[:best])
    return [chosen[i] for i in range(len(candidates))]


class Seconds:
    """What the step costs the requests that draw a token in it, as drafts are added.

    Prompts computed in the same step have their own time: only what drafts add to it counts against the drafts.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        shape: StepShape,
        step_time: StepTimes,
        draft_seconds: DraftSeconds | None,
    ) -> None:
        self._candidates = candidates
        self._shape = shape
        self._step_time = step_time
        self._draft_seconds = draft_seconds
        self._of_prompts = 0.0
        if shape.num_prefill_tokens:
            num_rows = max(shape.num_sampled, 1)
            alone = StepShape(num_rows, 0, shape.num_keys * num_rows // shape.num_tokens, num_rows)
            whole = step_time.predict(shape)
            self._of_prompts = max(0.0, whole - step_time.predict(alone))

    def add_row(self, i: int, length: int) -> None:
        """Draft `length` − 1 of candidate i joins the step."""
        position = self._candidates[i].position + length - 1
        shape = self._shape
        self._shape = StepShape(
            shape.num_decode_rows + 1,
            shape.num_prefill_tokens,
            shape.num_keys + self._step_time.keys(position, 1),
            shape.num_sampled + 1,
        )

    def loss(
        self, lengths: Sequence[int], trial: Sequence[int], survivals: Sequence[Sequence[float]]
    ) -> float:
        """What a step with `trial` takes longer than its expected tokens are worth at the pace of `lengths`, over the
        step with `lengths`; at least 0. Both are for the step without any drafts, which this becomes.
        """
        expected, taken = [], []
        for chosen in (lengths, trial):
            seconds = Seconds(self._candidates, self._shape, self._step_time, self._draft_seconds)
            for i, length in enumerate(chosen):
                for place in range(1, length + 1):
                    seconds.add_row(i, place)
            taken.append(seconds.of(chosen))
            gained = sum(sum(s[:n]) for s, n in zip(survivals, chosen, strict=True))
            expected.append(max(self._shape.num_sampled, 1) + gained)
        return max(0.0, taken[1] / taken[0] - expected[1] / expected[0])

    def of(self, lengths: Sequence[int]) -> float:
        seconds = self._step_time.predict(self._shape) - self._of_prompts
        if self._draft_seconds is None:
            return seconds
        drafted = [
            length
            for candidate, length in zip(self._candidates, lengths, strict=True)
            if candidate.is_drafted_by_executor and length
        ]
        return seconds + (self._draft_seconds(drafted) if drafted else 0.0)
