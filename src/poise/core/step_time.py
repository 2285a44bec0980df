"""How long a step will take: a cost model of a few coefficients, corrected by the steps that ran.

Knows counts of tokens, keys and rows; the coefficients are handed in (engine/step_times.py makes them
from models/cost). Invariant: where steps of a size were seen, a disturbed one moves no prediction, since
a correction is the median of many ratios.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import Final, Literal, NamedTuple

from poise.core.output import KVGroupSpec, ScheduledRequest

StepKind = Literal["decode", "prefill"]
KINDS: Final[tuple[StepKind, ...]] = ("decode", "prefill")
Fit = Mapping[StepKind, Mapping[int, float]]
"""Measured over modelled seconds, by kind of step and size class: steps of 2**(i-1) < tokens <= 2**i."""

WINDOW: Final = 31  # steps of a kind and size that its correction is the median of
NUM_VOTES_OF_A_FIT: Final = 3  # an earlier run's correction counts as so many steps of this one
NUM_ERRORS: Final = 256
MOST_COUNTED_ROWS: Final = (
    40  # steps of up to so many rows, no prompt among them, are known by their number too
)
LEAST_COUNTED, COUNTED_WINDOW = (
    3,
    7,
)  # few, so that what was seen beside a foreign load is soon forgotten


class StepShape(NamedTuple):
    """What a step computes.

    `num_keys`: pairs of a token and a key that it attends to, summed over layers. `num_sampled`: rows whose
    logits are needed.
    """

    num_decode_rows: int = 0
    num_prefill_tokens: int = 0
    num_keys: int = 0
    num_sampled: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + self.num_prefill_tokens

    @property
    def kind(self) -> StepKind:
        return "prefill" if self.num_prefill_tokens else "decode"


@dataclass(frozen=True, slots=True)
class StepCost:
    """Modelled seconds: for any step, and for each token, attended key and sampled row on top."""

    per_step: float
    per_token: float
    per_key: float
    per_sampled: float

    def seconds(self, shape: StepShape) -> float:
        return (
            self.per_step
            + self.per_token * shape.num_tokens
            + self.per_key * shape.num_keys
            + self.per_sampled * shape.num_sampled
        )


GUESSED_COST: Final = StepCost(5e-3, 5e-4, 1e-8, 1e-4)
"""Of a small model on two cores: where nobody hands in a better one."""


def visible_keys(start: int, num_tokens: int, window: int | None) -> int:
    """Keys that tokens at positions start … start + num_tokens − 1 see in sum: each itself and those before, up to `window`."""
    end = start + num_tokens
    if window is None:
        return (end * (end + 1) - start * (start + 1)) // 2
    ramp_end = min(max(window, start), end)  # before it a token sees fewer than `window`
    return visible_keys(start, ramp_end - start, None) + (end - ramp_end) * window


class RunningMedian:
    """The median of the last `window` values, of an even number the upper one in the middle."""

    def __init__(self, window: int, values: Iterable[float] = ()) -> None:
        self._window = window
        self._values: deque[float] = deque()
        self._in_order: list[float] = []
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> float:
        """Takes a value; returns the median now."""
        if len(self._values) == self._window:
            del self._in_order[bisect_left(self._in_order, self._values.popleft())]
        self._values.append(value)
        insort(self._in_order, value)
        return self._in_order[len(self._in_order) // 2]


class StepTimeModel:
    """seconds = cost model · correction, the correction interpolated between the sizes that were seen.

    Starts from `fit` (an earlier run's), or from the cost model as it is. `errors` are the last
    measured / predicted − 1.
    """

    def __init__(
        self,
        cost: StepCost = GUESSED_COST,
        groups: Sequence[KVGroupSpec] = (KVGroupSpec("full", 1),),
        fit: Fit | None = None,
    ) -> None:
        self._cost = cost
        layers: dict[int | None, int] = {}
        for group in groups:
            layers[group.sliding_window] = layers.get(group.sliding_window, 0) + group.num_layers
        self._layers = tuple(layers.items())
        self._full_layers = layers.get(None, 0)
        self._ratios: dict[StepKind, dict[int, RunningMedian]] = {kind: {} for kind in KINDS}
        self._medians: dict[StepKind, list[tuple[int, float]]] = {
            kind: sorted((fit or {}).get(kind, {}).items()) for kind in KINDS
        }
        self._counted: dict[int, RunningMedian] = {}  # ratios by number of rows
        self._counted_medians: dict[int, float] = {}
        self.errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self.num_observed = 0

    @property
    def is_fitted(self) -> bool:
        """Whether any real step stands behind the predictions."""
        return any(self._medians.values())

    @property
    def fit(self) -> dict[StepKind, dict[int, float]]:
        """The corrections as they are now, for a later run to start from."""
        return {kind: dict(medians) for kind, medians in self._medians.items()}

    # --- shapes -----------------------------------------------------------------------------------

    def keys(self, start: int, num_tokens: int) -> int:
        """Keys that rows start … start + num_tokens − 1 attend to, summed over layers."""
        return sum(n * visible_keys(start, num_tokens, window) for window, n in self._layers)

    def shape_of(self, scheduled: Sequence[ScheduledRequest]) -> StepShape:
        """Of a step: one row that samples is a decode's, so are drafts; everything else is prefill."""
        num_decodes = num_prefill = decode_length = num_keys = num_sampled = 0
        windowed = len(self._layers) > 1 or not self._full_layers
        for item in scheduled:
            num_sampled += item.samples
            if item.num_drafts:
                num_sampled += item.num_drafts
                num_decodes += item.num_drafts
                num_keys += self.keys(item.start + item.num_tokens, item.num_drafts)
            if item.num_tokens == 1 and item.samples:
                num_decodes += 1
                decode_length += item.start + 1
                if windowed:
                    num_keys += self.keys(item.start, 1)
            else:
                num_prefill += item.num_tokens
                num_keys += self.keys(item.start, item.num_tokens)
        if not windowed:
            num_keys += decode_length * self._full_layers
        return StepShape(num_decodes, num_prefill, num_keys, num_sampled)

    @property
    def cost(self) -> StepCost:
        """The model that is corrected."""
        return self._cost

    def with_drafts(self, shape: StepShape, start: int, num_drafts: int) -> StepShape:
        """The step with drafts more, of one request, from position `start` on."""
        return StepShape(
            shape.num_decode_rows + num_drafts,
            shape.num_prefill_tokens,
            shape.num_keys + self.keys(start, num_drafts),
            shape.num_sampled + num_drafts,
        )

    # --- predicting -------------------------------------------------------------------------------

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step takes."""
        return self._cost.seconds(shape) * self._correction(shape.kind, shape.num_tokens)

    def _correction(self, kind: StepKind, num_tokens: int) -> float:
        if (
            kind == "decode"
        ):  # kernels work in tiles: the ninth row may cost more than the eight before
            counted = self._counted_medians.get(num_tokens)
            if counted is not None:
                return counted
        medians = self._medians[kind]
        if not medians:
            other = self._medians["prefill" if kind == "decode" else "decode"]
            if not other:
                return 1.0
            medians = other
        place = log2(num_tokens) if num_tokens else 0.0
        if place <= medians[0][0]:
            return medians[0][1]
        for (low, before), (high, after) in pairwise(medians):
            if place <= high:
                return before + (after - before) * (place - low) / (high - low)
        return medians[-1][1]

    def largest_prefill(self, decodes: StepShape, start: int, seconds: float, most: int) -> int:
        """How many prompt tokens from position `start` a step with these decodes can take and still
        end within `seconds`: 0 … most.
        """
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            shape = StepShape(
                decodes.num_decode_rows,
                middle,
                decodes.num_keys + self.keys(start, middle),
                decodes.num_sampled + 1,
            )
            if self.predict(shape) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    # --- learning ---------------------------------------------------------------------------------

    def observe(self, shape: StepShape, seconds: float) -> float:
        """Takes a step that ran; returns measured / predicted, as it was before this step counted."""
        if seconds <= 0 or shape.num_tokens == 0:
            return 1.0
        kind = shape.kind
        modelled = self._cost.seconds(shape)
        ratio = seconds / (modelled * self._correction(kind, shape.num_tokens))
        self.errors.append(ratio - 1)
        self.num_observed += 1
        if kind == "decode" and shape.num_tokens <= MOST_COUNTED_ROWS:
            counted = self._counted.get(shape.num_tokens)
            if counted is None:
                counted = self._counted[shape.num_tokens] = RunningMedian(COUNTED_WINDOW)
            median = counted.add(seconds / modelled)
            if len(counted) >= LEAST_COUNTED:
                self._counted_medians[shape.num_tokens] = median
        size = (shape.num_tokens - 1).bit_length()
        medians = self._medians[kind]
        place = bisect_left(medians, (size,))
        known = place < len(medians) and medians[place][0] == size
        ratios = self._ratios[kind].get(size)
        if ratios is None:
            votes = [medians[place][1]] * NUM_VOTES_OF_A_FIT if known else []
            ratios = self._ratios[kind][size] = RunningMedian(WINDOW, votes)
        medians[place : place + known] = [(size, ratios.add(seconds / modelled))]
        return ratio
