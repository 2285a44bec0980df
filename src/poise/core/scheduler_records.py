"""What the scheduler tells others: what a step gave each request, totals, and a snapshot.

Plain data; knows no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from poise.core.output import TokenLogprobs
from poise.core.request import Request


class RequestUpdate(NamedTuple):
    """What one step gave one request. `logprobs` go with `new_token_ids` where they were asked for.

    `prompt_logprobs` are for the prompt positions that follow those delivered before.
    `finish_reason` is stop, length or error; requests that others ended get no update.
    """

    request: Request
    new_token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start. Tokens recomputed after a restart count again."""

    num_steps: int = 0
    num_prefix_query_tokens: int = 0  # known tokens of each request at each admission
    num_prefix_hit_tokens: int = 0  # of these, taken from the cache
    num_prefix_bypasses: int = 0  # admissions that ignored hits for the sake of prompt_logprobs
    num_preemptions: int = 0
    num_computed_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_failed_steps: int = 0
    num_broken_requests: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot: gauges and totals. Pages that only hold cached content count as free."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    counters: SchedulerCounters

    @property
    def kv_cache_usage(self) -> float:
        """Share of pages that running requests hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_total_blocks
