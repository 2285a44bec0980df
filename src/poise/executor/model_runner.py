"""The real executor: one native call per step, with the GIL released.

Knows arrays and the backend; does not know queues, text or time. Invariant: a step either returns whole or raises.
"""

from __future__ import annotations

import numpy as np

from poise.core.output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from poise.executor.input_batch import InputBatch
from poise.kernels.cpu.backend import CPUBackend
from poise.sampling.rows import OK, token_ids, token_logprobs


class ModelRunner:
    """Executor over a recorded model (see `core.output.Executor`)."""

    def __init__(self, backend: CPUBackend, batch: InputBatch) -> None:
        self._backend = backend
        self._batch = batch

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step. Raises ValueError for rows out of range (nothing was drawn)."""
        batch = self._batch.build(output)
        if not output.scheduled:
            return ModelRunnerOutput(token_ids={})
        results = batch.results
        self._backend.run(batch.step, batch.sampling, results.view(np.uint8))
        drawn: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        broken: set[int] = set()
        statuses: list[int] = results["status"].tolist()
        for i, (row, token_id) in enumerate(zip(batch.logit_rows, token_ids(results))):
            if statuses[i] != OK:
                broken.add(row.request_id)
            elif row.draws:
                drawn[row.request_id] = [token_id]
                self._batch.append(row.request_id, token_id)
                if self._batch[row.request_id].wants_logprobs:
                    logprobs[row.request_id] = [token_logprobs(results, i)]
            else:
                prompt_logprobs.setdefault(row.request_id, []).append(token_logprobs(results, i))
        for request_id in broken:
            drawn.pop(request_id, None)
        return ModelRunnerOutput(drawn, logprobs, prompt_logprobs, frozenset(broken))
