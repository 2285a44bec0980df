"""Faults of speculative decoding: patches for `verify/faults.py`, each a defect that engines were shipped with.

Nothing here runs unless asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np

from poise.core.output import SchedulerOutput
from poise.executor import model_runner
from poise.executor.input_batch import Batch, InputBatch, LogitRow
from poise.kernels.ops import Step
from poise.kernels.reference import ReferenceBackend
from poise.kernels.reference_math import F32
from poise.sampling.rows import (
    NO_LOGPROBS,
    RESULT_TYPE,
    Int32s,
    SamplingRows,
    SamplingState,
)
from poise.sampling.rows import outcomes as true_outcomes
from poise.spec_decode import acceptance

Slots = set[tuple[int, int, int]]  # KV group, block, offset


@contextmanager
def drafted_kv_left_visible() -> Iterator[None]:
    """The row of a token that took a rejected draft's place does not write its KV: the draft's stands there."""
    begin, write = ReferenceBackend.begin, ReferenceBackend.rope_kv_write
    written: WeakKeyDictionary[ReferenceBackend, tuple[Slots, Slots]] = WeakKeyDictionary()

    def begin_step(self: ReferenceBackend, step: Step) -> None:
        begin(self, step)
        slots = {
            (group, int(block), int(offset))
            for group in range(self._kv.num_groups)
            for block, offset in zip(*self._slots(group))
        }
        written[self] = (written.get(self, (set(), set()))[1], slots)

    def rope_kv_write(
        self: ReferenceBackend, qkv: F32, rope: Any, layer: int, *rest: Any, **options: Any
    ) -> F32:
        group, place = self._kv.place(layer)
        blocks, offsets = self._slots(group)
        before = written[self][0]
        rows = [
            row
            for row in self.step.query_start[:-1]
            if self.step.positions[row] > 0 and (group, blocks[row], offsets[row]) in before
        ]
        slots = (place, slice(None), blocks[rows], offsets[rows])
        pages = self.pages[slots].copy()
        scales = self.scales[slots].copy() if self.scales.ndim > 1 else None
        result = write(self, qkv, rope, layer, *rest, **options)
        self.pages[slots] = pages
        if scales is not None:
            self.scales[slots] = scales
        return result

    with (
        patch.object(ReferenceBackend, "begin", begin_step),
        patch.object(ReferenceBackend, "rope_kv_write", rope_kv_write),
    ):
        yield


@contextmanager
def accept_if_argmax_equal() -> Iterator[None]:
    """A draft is accepted if it is the most likely token, whatever the request draws there."""
    build, fill = InputBatch.build, SamplingState.fill
    rows: list[LogitRow] = []

    def build_and_remember(self: InputBatch, output: SchedulerOutput) -> Batch:
        batch = build(self, output)
        rows[:] = batch.logit_rows
        return batch

    def fill_with_best(self: SamplingState, records: SamplingRows, index: int, *rest: Any) -> None:
        fill(self, records, index, *rest)
        if records.records["num_logprobs"][index] == NO_LOGPROBS:
            records.records["num_logprobs"][index] = 1  # so that the sampler tells the best one

    def outcomes(result_view: memoryview) -> Iterable[tuple[int, int]]:
        results = np.frombuffer(result_view, RESULT_TYPE)
        drawn_rows = zip(rows, true_outcomes(result_view), strict=True)
        for i, (row, (status, token_id)) in enumerate(drawn_rows):
            is_best = results["num_top"][i] and results["top_ids"][i][0] == row.draft
            yield status, row.draft if is_best else token_id

    with (
        patch.object(InputBatch, "build", build_and_remember),
        patch.object(SamplingState, "fill", fill_with_best),
        patch.object(model_runner, "outcomes", outcomes),
    ):
        yield


def residual_from_the_wrong_q() -> AbstractContextManager[object]:
    """What replaces a rejected draft is drawn from p less a q that the draft was not drawn from."""
    residual = acceptance.residual

    def residual_of_another(z: F32, p: F32, q: F32 | None, drafts: acceptance.TokenIds) -> F32:
        wrong = None if q is None else np.roll(q, 1, axis=1)
        return residual(z, p, wrong, np.roll(drafts, 1) + 1 if q is None else drafts)

    return patch.object(acceptance, "residual", residual_of_another)


def penalties_without_drafts() -> AbstractContextManager[object]:
    """Rows behind drafts are penalised as if the drafts before them had not been drawn."""
    fill = SamplingState.fill

    def fill_as_before(
        self: SamplingState,
        rows: SamplingRows,
        index: int,
        history: Int32s,
        num_known: int,
        place: int = 0,
        *rest: Any,
    ) -> None:
        fill(self, rows, index, history, num_known, place, *rest)
        counted = np.int32(rows.records["num_output_tokens"][index])
        rows.records["num_output_tokens"][index] = max(0, counted - place)

    return patch.object(SamplingState, "fill", fill_as_before)
