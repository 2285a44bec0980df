"""The real executor: one native call per step, with the GIL released.

Knows arrays and the backend; does not know queues, text or time. Invariant: a step either returns whole or raises.
"""

from __future__ import annotations

from time import monotonic_ns

import numpy as np
from numpy.typing import NDArray

from poise.core.output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs, WorkDone
from poise.executor.input_batch import NO_DRAFT, Batch, InputBatch
from poise.executor.model_draft import ModelDrafter
from poise.executor.profile import ExecutorProfile
from poise.kernels.cpu.backend import CPUBackend
from poise.kernels.cpu.recorded import WorkCounter
from poise.kernels.ops import Step
from poise.sampling.rows import OK, outcomes, token_logprobs


class ModelRunner:
    """Executor over a recorded model (see `core.output.Executor`)."""

    def __init__(
        self, backend: CPUBackend, batch: InputBatch, drafter: ModelDrafter | None = None
    ) -> None:
        self._backend = backend
        self._batch = batch
        self._drafter = drafter
        self._profile: ExecutorProfile | None = None
        self._work = WorkCounter(backend.operations)
        self._native_nanoseconds = 0

    def start_profile(self) -> None:
        """Begins to time operations, afresh if it does so already."""
        self._backend.plan.profiling = True
        self._profile = ExecutorProfile(self._backend.operations, self._backend.pool.threads)

    def stop_profile(self) -> ExecutorProfile | None:
        """What was timed; None if nothing was."""
        self._backend.plan.profiling = False
        profile, self._profile = self._profile, None
        return profile

    def _run(self, batch: Batch) -> None:
        begin = monotonic_ns()
        self._backend.run(batch.step, batch.sampling, batch.result_bytes)
        end = monotonic_ns()
        self._native_nanoseconds += end - begin
        alone = len(batch.rows.spans) == 1
        spared_keys = () if alone else self._backend.spared_keys
        self._work.add(batch.rows, spared_keys)
        if self._profile is not None:
            noted, plan = monotonic_ns(), self._backend.plan
            times, waits = plan.operation_times, plan.worker_waits
            self._profile.add(batch.rows, begin, end, times, waits, spared_keys)
            self._profile.own_nanoseconds += monotonic_ns() - noted

    def work_done(self) -> WorkDone:
        """Of all steps so far."""
        work = self._work.total()
        seconds = self._native_nanoseconds / 1e9
        return WorkDone(work.read_bytes, work.flops, seconds, self._work.spared_keys)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. Raises ValueError for rows out of range (nothing was drawn)."""
        self._batch.apply(output)
        if not output.scheduled:
            return ModelRunnerOutput(token_ids={})
        draft_seconds = self._drafter.draft(output) if self._drafter is not None else 0.0
        batch = self._batch.build(output)
        self._run(batch)
        drawn: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        broken: set[int] = set()
        counts = True  # of a row behind a draft: the draft was drawn
        drawn_rows = zip(batch.logit_rows, outcomes(batch.result_view), strict=True)
        for i, (row, (status, token_id)) in enumerate(drawn_rows):
            request_id, draws, place, draft = row
            if place and not counts:
                continue
            counts = status == OK and token_id == draft
            if status != OK:
                if place:
                    continue  # it breaks again when its draft is known
                if draft == NO_DRAFT:
                    broken.add(request_id)
                else:  # the NaN may be a draft's: it shows in all rows of a block of keys
                    drawn[request_id] = []
            elif draws:
                drawn.setdefault(request_id, []).append(token_id)
                if self._batch.append(request_id, token_id).wants_logprobs:
                    logprobs.setdefault(request_id, []).append(token_logprobs(batch.results, i))
            else:
                prompt_logprobs.setdefault(request_id, []).append(token_logprobs(batch.results, i))
        for request_id in broken:
            drawn.pop(request_id, None)
        for scheduled in output.scheduled:
            if scheduled.num_drafts:
                if drawn[scheduled.request_id]:
                    self._batch.settle(scheduled)
                else:
                    self._batch.undo(scheduled)
        return ModelRunnerOutput(drawn, logprobs, prompt_logprobs, frozenset(broken), draft_seconds)

    def logits(self, step: Step, out: NDArray[np.float32]) -> None:
        """Runs one step that draws nothing; fills `out` float32 [len(step.logit_rows), vocabulary]."""
        self._backend.run(step, logits=out)
