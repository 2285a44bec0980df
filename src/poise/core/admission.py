"""Whether a request may join the queue, and when a refused one should come back: by predicted drain.

Knows amounts, not requests' content or pages. Invariant: an empty queue takes anybody, so whatever could
ever be served can be served; promises to those refused follow one another, so they don't return together.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from poise.core.limits import Limits
from poise.core.request import Request
from poise.core.step_time import StepShape, StepTimeModel
from poise.errors import DeadlineError, QueueFullError

NUM_RECENT: Final = 128  # finished and arrived requests that averages are over
PRIOR_OUTPUT_TOKENS: Final = 64  # before any request has finished
SPARE_PART: Final = 1 / 16  # of the queue: room beyond what was promised, since predictions err


@dataclass(frozen=True, slots=True)
class Load:
    """What there is to do before a newcomer's turn. Prompt tokens are those still to compute."""

    num_running: int
    num_running_prompt_tokens: int
    num_waiting: int
    num_waiting_tokens: int
    num_known_tokens: int  # of the running requests: their keys
    num_pool_tokens: int  # that all pages hold


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now, by prediction, to a newcomer's first token and to its end."""

    first_token: float
    end: float


class _Recent:
    """The mean of the last few numbers; 0 where there are none."""

    def __init__(self) -> None:
        self._numbers: deque[int] = deque(maxlen=NUM_RECENT)
        self.mean = 0.0

    def add(self, number: int) -> None:
        self._numbers.append(number)
        self.mean = sum(self._numbers) / len(self._numbers)


class Drain:
    """How fast work goes away: the step-time model and what requests were like lately."""

    def __init__(self, limits: Limits, step_time: StepTimeModel) -> None:
        self._limits = limits
        self._step_time = step_time
        self._outputs = _Recent()
        self._prompts = _Recent()

    def arrived(self, num_prompt_tokens: int) -> None:
        self._prompts.add(num_prompt_tokens)

    def finished(self, num_output_tokens: int) -> None:
        """A request came to its own end."""
        self._outputs.add(num_output_tokens)

    @property
    def mean_output(self) -> float:
        return self._outputs.mean or PRIOR_OUTPUT_TOKENS

    @property
    def mean_prompt(self) -> float:
        return self._prompts.mean or 1.0

    def expected_output(self, max_tokens: int) -> float:
        """As long as answers were lately, within the limit; the limit itself where none has ended."""
        return min(max_tokens, self._outputs.mean or max_tokens)

    def num_slots(self, load: Load) -> int:
        """Requests that run side by side: as many as may, or as the pages hold of average ones."""
        each = max(1.0, self.mean_prompt + self.mean_output / 2)
        return max(1, min(self._limits.max_num_running, int(load.num_pool_tokens / each)))

    def decode_seconds(self, load: Load, num_rows: int) -> float:
        """One step of `num_rows` decoding requests as long as those that run."""
        length = int(load.num_known_tokens / load.num_running) if load.num_running else 0
        length = length or int(self.mean_prompt)
        keys = num_rows * self._step_time.keys(length, 1)
        return self._step_time.predict(StepShape(num_rows, 0, keys, num_rows))

    def prefill_seconds(self, num_tokens: float) -> float:
        """Prompt tokens in steps as full as they get, without the rows of others."""
        chunk = max(1, min(self._limits.max_num_batched_tokens, math.ceil(num_tokens)))
        shape = StepShape(0, chunk, self._step_time.keys(0, chunk), 1)
        return self._step_time.predict(shape) * num_tokens / chunk

    def request_seconds(self, load: Load) -> float:
        """Seconds between two average requests leaving a queue that is never empty."""
        slots = self.num_slots(load)
        decode = self.mean_output * self.decode_seconds(load, slots) / slots
        return decode + self.prefill_seconds(self.mean_prompt)

    def queue_seconds(self, load: Load) -> float:
        """Until a request that joins the queue now is admitted."""
        slots = self.num_slots(load)
        num_before = max(0, load.num_running + load.num_waiting + 1 - slots)
        decode = num_before * self.mean_output * self.decode_seconds(load, slots) / slots
        ahead = load.num_waiting_tokens + load.num_running_prompt_tokens
        return decode + (self.prefill_seconds(ahead) if ahead else 0.0)

    def forecast(self, load: Load, num_prompt_tokens: int, max_tokens: int) -> Forecast:
        slots = self.num_slots(load)
        num_beside = min(slots, load.num_running + load.num_waiting + 1)
        step = self.decode_seconds(load, num_beside)
        prefill = self.prefill_seconds(num_prompt_tokens)
        if num_beside > 1:  # the steps that compute the prompt have the others' rows too
            prefill += step * math.ceil(num_prompt_tokens / self._limits.max_num_batched_tokens)
        first = self.queue_seconds(load) + prefill
        return Forecast(first, first + (self.expected_output(max_tokens) - 1) * step)


class Admission:
    """Decides and counts. `decisions` are totals by (decision, reason).

    `first_token_errors`: of the last requests, how much later than predicted the first token came,
    as a part of the real time.
    """

    def __init__(self, limits: Limits, step_time: StepTimeModel) -> None:
        self._limits = limits
        self._step_time = step_time
        self.drain = Drain(limits, step_time)
        self.decisions: dict[tuple[str, str], int] = {}
        self.load: Load | None = None  # as last seen
        self._lock = threading.Lock()  # `refuse_early` may be called by any thread
        self.first_token_errors: deque[float] = deque(maxlen=NUM_RECENT)
        self._promised = (
            -math.inf
        )  # the latest instant at which a refused request was told to return

    def count(self, decision: str, reason: str, num_requests: int = 1) -> None:
        key = (decision, reason)
        with self._lock:
            self.decisions[key] = self.decisions.get(key, 0) + num_requests

    def first_token(self, request: Request, now: float) -> None:
        """A request got its first token: was the prediction right?"""
        predicted = request.predicted_first_token_time
        if predicted is not None and now > request.arrival_time:
            self.first_token_errors.append((now - predicted) / (now - request.arrival_time))

    def max_num_queued_tokens(self, load: Load) -> int | None:
        """The bound as it is now; None where there is none."""
        if self._limits.max_num_queued_tokens is not None or self._limits.max_queue_seconds is None:
            return self._limits.max_num_queued_tokens
        per_token = self.drain.request_seconds(load) / self.drain.mean_prompt
        tokens = int(self._limits.max_queue_seconds / per_token)
        limits = self._limits
        return max(tokens, limits.max_num_batched_tokens, limits.min_num_queued_tokens)

    def check_queue(self, now: float, load: Load, num_requests: int, num_tokens: int) -> None:
        """Raises QueueFullError if `num_requests` with `num_tokens` prompt tokens in all are too many."""
        if load.num_waiting == 0:
            self._promised = min(self._promised, now)  # those who were to come back could be served
            return
        most = self._limits.max_num_queued_reqs
        if most is not None and load.num_waiting + num_requests > most:
            self._refuse(
                now, load, "queued_requests", num_requests,
                f"{load.num_waiting} requests are waiting, {most} may (--max-num-queued-reqs)",
            )  # fmt: skip
        most_tokens = self.max_num_queued_tokens(load)
        if most_tokens is not None and load.num_waiting_tokens + num_tokens > most_tokens:
            self._refuse(
                now, load, "queued_tokens", num_requests,
                f"{load.num_waiting_tokens} prompt tokens are waiting, {num_tokens} more would pass "
                f"the {most_tokens} that may (--max-num-queued-tokens)",
            )  # fmt: skip

    def refuse_early(
        self, now: float, num_before: int, num_requests: int, num_prompt_tokens: int
    ) -> None:
        """As `check_queue`, by any thread, on the load as last seen and with `num_before` others on their way."""
        load = self.load
        if load is not None:
            load = replace(load, num_waiting=load.num_waiting + num_before)
            self.check_queue(now, load, num_requests, num_prompt_tokens * num_requests)

    def _refuse(self, now: float, load: Load, reason: str, num_requests: int, why: str) -> None:
        self.count("refused", reason, num_requests)
        seconds = self._promise(now, load, num_requests)
        raise QueueFullError(
            f"{why}; try again in {math.ceil(seconds)} s",
            reason=reason,
            retry_after_seconds=seconds,
        )

    def _promise(self, now: float, load: Load, num_requests: int) -> float:
        """Seconds until there is room, after all that were told to return before."""
        each = self.drain.request_seconds(load)
        spare = max(1.0, load.num_waiting * SPARE_PART)
        with self._lock:
            self._promised = max(self._promised, now + spare * each) + num_requests * each
            return self._promised - now

    def check_deadline(
        self, now: float, load: Load, deadline: float, request: Request, forecast: Forecast
    ) -> None:
        """Raises DeadlineError if the deadline has passed or, by prediction, can't be met.

        Nothing is predicted before a real step stands behind the model.
        """
        left = deadline - now
        if left <= 0:
            self._miss("deadline_passed", 0.0, f"the deadline passed {-left:.3f} s ago")
        if not self._step_time.is_fitted:
            return
        for reason, what, seconds in (
            ("deadline_first_token", "the first token", forecast.first_token),
            ("deadline_end", "the end", forecast.end),
        ):
            if seconds > left:
                idle = Load(0, 0, 0, 0, 0, load.num_pool_tokens)
                alone = self.drain.forecast(idle, request.num_prompt_tokens, request.max_tokens)
                helps = (alone.end if reason == "deadline_end" else alone.first_token) <= left
                wait = max(0.0, forecast.first_token - alone.first_token) if helps else 0.0
                self._miss(
                    reason, wait,
                    f"{what} is predicted in {seconds:.3f} s, the deadline is in {left:.3f} s",
                )  # fmt: skip

    def _miss(self, reason: str, retry_after_seconds: float, why: str) -> None:
        self.count("refused", reason)
        raise DeadlineError(why, reason=reason, retry_after_seconds=retry_after_seconds)
