"""The numbers that bound the scheduler, in one record.

Knows no flags (config.py::SchedulerConfig has those) and no model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_num_batched_tokens` are computed in a step, by at most `max_num_seqs` requests.

    target_itl_seconds: while others decode, a step takes only as many prompt tokens as end within this,
        by prediction; None: as many as fit.
    max_num_partial_prefills: prompts that may be half computed at once; None: any number.
    long_prefill_token_threshold: no request computes more prompt tokens than this in a step while others
        want some; 0: as many as fit.
    watermark: part of the pages that must stay free when a request is admitted beside others.
    num_preemptions_to_protect: after so many a request is not preempted while another can be.
    max_num_queued_reqs, max_num_queued_tokens: what may wait; None: no bound.
    max_queue_seconds: where max_num_queued_tokens is None, as many as drain in this time by prediction,
        but never fewer than min_num_queued_tokens; None: no bound.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    target_itl_seconds: float | None = None
    max_num_partial_prefills: int | None = None
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    num_preemptions_to_protect: int = 3
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_queue_seconds: float | None = None
    min_num_queued_tokens: int = 0

    def __post_init__(self) -> None:
        assert min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len) > 0
        assert 0 <= self.watermark < 1

    @property
    def max_num_running(self) -> int:
        """No more than a step has tokens, so that each running request gets at least one."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)
