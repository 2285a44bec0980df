"""Drafts by the model itself in 4 bits, at the start of a step: a second recorded plan over the target's KV pages.

Knows a plan and the requests' states; knows nothing of acceptance. Invariant: a draft's KV lies in slots that the
target's own rows of the same step overwrite before they are read, so drafting leaves nothing behind but drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import numpy as np

from poise.core.output import ScheduledRequest, SchedulerOutput
from poise.core.step_time import StepShape, StepTimeModel
from poise.executor.input_batch import InputBatch
from poise.kernels.cpu.backend import CPUBackend
from poise.sampling.rows import OK, token_ids


class SelfDrafter:
    """`times` predicts a step of the drafting plan and learns from each; keys are left to its corrections."""

    def __init__(self, backend: CPUBackend, batch: InputBatch, times: StepTimeModel) -> None:
        self._backend = backend
        self._batch = batch
        self._times = times
        self.num_bytes = backend.arena.used_bytes

    def draft(self, output: SchedulerOutput) -> float:
        """Places the drafts that the scheduler left to the executor behind the known tokens, one place of all
        requests after the other; returns the seconds that it took.
        """
        asked = [item for item in output.scheduled if item.num_drafts and not item.draft_token_ids]
        begin = monotonic()
        for place in range(max((item.num_drafts for item in asked), default=0)):
            self._draft_place([item for item in asked if item.num_drafts > place], place)
        return monotonic() - begin if asked else 0.0

    def _draft_place(self, items: Sequence[ScheduledRequest], place: int) -> None:
        begin = monotonic()
        batch = self._batch.build_drafts(items, place)
        self._backend.run(batch.step, batch.sampling, batch.results.view(np.uint8))
        statuses = batch.results["status"].tolist()
        for item, status, token_id in zip(items, statuses, token_ids(batch.results), strict=True):
            state = self._batch[item.request_id]
            state.tokens[state.num_known + place] = token_id if status == OK else 0
        num_rows = len(batch.step.token_ids)
        self._times.observe(
            StepShape(len(items), num_rows - len(items), 0, len(items)), monotonic() - begin
        )

    def seconds(self, lengths: Sequence[int]) -> float:
        """Of drafting so many tokens for each of these requests, none of which computes its prompt."""
        total = 0.0
        for place in range(max(lengths, default=0)):
            num_rows = sum(length > place for length in lengths)
            total += self._times.predict(StepShape(num_rows, 0, 0, num_rows))
        return total
