"""Drafts made by a model, at the start of a step: a second recorded plan over the pages of the first.

Knows a plan and the requests' states; knows nothing of acceptance. The model is either the target in 4 bits, which reads the
target's KV and writes over it, or another one, with KV groups of its own. Invariant: drafting leaves nothing behind that a
target's row reads. A draft of the target's own writes to slots that the target's rows of the same step overwrite first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic

import numpy as np

from poise.core.output import ScheduledRequest, SchedulerOutput
from poise.core.step_time import StepShape, StepTimeModel
from poise.executor.input_batch import DraftRows, InputBatch
from poise.kernels.cpu.backend import CPUBackend
from poise.kernels.ops import Step
from poise.sampling.rows import OK, outcomes


class ModelDrafter:
    """`times` predicts a step of the drafting plan and learns from each; keys are left to its corrections."""

    def __init__(
        self, backend: CPUBackend, batch: InputBatch, times: StepTimeModel, *, has_own_kv: bool
    ) -> None:
        self._backend = backend
        self._batch = batch
        self._times = times
        self._has_own_kv = has_own_kv
        self.num_bytes = backend.arena.used_bytes

    def probe(self) -> None:
        """Learns what a draft takes from two steps of one row, the first of which finds the weights cold. For a time when no
        request has pages: a guess that is too high would never be put right, since nothing would be drafted.
        """
        first = np.zeros(1, np.int32)
        tables = np.zeros((1, self._backend.kv.num_groups), np.int32)
        step = Step(first, first, np.array([0, 1], np.int32), tables, first)
        for _ in range(2):
            begin = monotonic()
            self._backend.run(step)
            seconds = monotonic() - begin
        self._times.observe(StepShape(1, 0, 0, 1), seconds)

    def draft(self, output: SchedulerOutput) -> float:
        """Places the drafts that the scheduler left to the executor behind the known tokens, one place of all
        requests after the other; returns the seconds that it took.
        """
        begin = monotonic()
        asked = [item for item in output.scheduled if item.num_drafts and not item.draft_token_ids]
        if self._has_own_kv:
            self._follow(output)
        for place in range(max((item.num_drafts for item in asked), default=0)):
            self._draft_place([item for item in asked if item.num_drafts > place], place)
        return monotonic() - begin

    def _follow(self, output: SchedulerOutput) -> None:
        """Computes the draft's KV of prompts as they are computed, and of tokens that came since it last drafted; the last
        few of them and the last known one are left to the rows of the first draft, which are at most as many as those that
        the target verifies.
        """
        behind: list[DraftRows] = []
        for item in output.scheduled:
            state = self._batch[item.request_id]
            if not state.drafts_by_model:
                continue
            if state.draft_end is None:
                state.draft_end = item.start
            end = item.start + item.num_tokens
            if item.num_drafts:
                end -= 1
                is_due = end - state.draft_end > item.num_drafts
            else:
                is_due = item.num_tokens > 1 and end > state.draft_end
            if is_due:
                behind.append(DraftRows(item.request_id, state.draft_end, end))
                state.draft_end = end
        for rows in self._in_steps(behind):
            self._run(rows, draws=False)

    def _in_steps(self, behind: Sequence[DraftRows]) -> Iterator[list[DraftRows]]:
        """The same rows, none of which comes before another of its request, in steps that the plan can run."""
        most = self._batch.max_rows
        step: list[DraftRows] = []
        left = most
        for rows in behind:
            start = rows.start
            while start < rows.end:
                if left == 0:
                    yield step
                    step, left = [], most
                end = min(rows.end, start + left)
                step.append(DraftRows(rows.request_id, start, end))
                left -= end - start
                start = end
        if step:
            yield step

    def _draft_place(self, items: Sequence[ScheduledRequest], place: int) -> None:
        rows = []
        for item in items:
            state = self._batch[item.request_id]
            last = state.num_known + place
            start = last - 1
            if place == 0:
                start = item.start if state.draft_end is None else min(start, state.draft_end)
            rows.append(DraftRows(item.request_id, start, last))
        for item, token_id in zip(items, self._run(rows, draws=True), strict=True):
            state = self._batch[item.request_id]
            state.tokens[state.num_known + place] = token_id
            if self._has_own_kv:
                state.draft_end = state.num_known + place

    def _run(self, rows: Sequence[DraftRows], *, draws: bool) -> list[int]:
        """One step of the plan; the token behind each request's rows, if it `draws`."""
        begin = monotonic()
        batch = self._batch.build_drafts(rows, own_groups=self._has_own_kv, draws=draws)
        self._backend.run(batch.step, batch.sampling, batch.result_bytes)
        num_rows, num_drawn = len(batch.step.token_ids), len(batch.logit_rows)
        shape = StepShape(num_drawn, num_rows - num_drawn, 0, num_drawn)
        self._times.observe(shape, monotonic() - begin)
        return [token_id if status == OK else 0 for status, token_id in outcomes(batch.result_view)]

    def seconds(self, lengths: Sequence[int]) -> float:
        """Of drafting so many tokens for each of these requests, none of which computes its prompt."""
        total = 0.0
        for place in range(max(lengths, default=0)):
            num_rows = sum(length > place for length in lengths)
            total += self._times.predict(StepShape(num_rows, 0, 0, num_rows))
        return total
