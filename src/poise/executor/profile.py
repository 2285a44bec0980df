"""Where the time of steps goes: each operation's, the workers' waiting, and the modelled bytes and flops beside them.

Lives in the executor while a profile runs; knows nothing of requests. Invariant: it only reads what a step left behind, so
answers are the same bytes with and without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poise.kernels.cpu.recorded import RecordedOperation, Rows, WorkCounter

TRACED_STEPS = 256  # the last ones
SUMMED_TOGETHER = 32  # steps: numpy, gone cold in a step, is called for many of them at once


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step. Times are ns of the monotonic clock: `boundaries` before the first operation and behind each one."""

    begin: int
    end: int
    rows: int
    logit_rows: int
    boundaries: Sequence[int]


@dataclass(frozen=True, slots=True)
class OperationTotals:
    """One operation of the plan over all steps of a profile."""

    name: str
    nanoseconds: int
    read_bytes: int
    flops: int


class ExecutorProfile:
    """Totals over steps, and the last steps one by one."""

    def __init__(self, operations: Sequence[RecordedOperation], threads: int) -> None:
        self._names = [operation.name for operation in operations]
        self._work = WorkCounter(operations)
        self._not_summed: list[tuple[Sequence[int], Sequence[int]]] = []  # boundaries, waits
        self._nanoseconds = np.zeros(len(operations), np.int64)
        self._waited = np.zeros(threads, np.int64)
        self.num_steps = 0
        self.num_rows = 0
        self.num_logit_rows = 0
        self.native_nanoseconds = 0
        self.own_nanoseconds = 0  # what taking steps took, which serving does not
        self.traced: deque[TracedStep] = deque(maxlen=TRACED_STEPS)

    def add(
        self,
        rows: Rows,
        begin: int,
        end: int,
        boundaries: Sequence[int],
        waits: Sequence[int],
        spared_keys: Sequence[int] = (),
    ) -> None:
        """Takes a step that ran from `begin` to `end` (ns); `spared_keys` by KV group."""
        traced = TracedStep(begin, end, rows.num_rows, len(rows.wanted), boundaries)
        self.num_steps += 1
        self.num_rows += traced.rows
        self.num_logit_rows += traced.logit_rows
        self.native_nanoseconds += end - begin
        self._not_summed.append((boundaries, waits))
        if len(self._not_summed) == SUMMED_TOGETHER:
            self._sum()
        self._work.add(rows, spared_keys)
        self.traced.append(traced)

    def _sum(self) -> None:
        """Adds the times of the steps that are not in the sums yet."""
        if self._not_summed:
            boundaries, waits = zip(*self._not_summed, strict=True)
            self._nanoseconds += np.diff(np.array(boundaries, np.int64)).sum(axis=0)
            self._waited += np.array(waits, np.int64).sum(axis=0)
            self._not_summed.clear()

    @property
    def spared_keys(self) -> int:
        """Keys that the pass of another sequence served (see `core.output.WorkDone`)."""
        return self._work.spared_keys

    @property
    def names(self) -> list[str]:
        """Of the operations, in the order of the plan."""
        return list(self._names)

    @property
    def waited_nanoseconds(self) -> list[int]:
        """How long each worker waited for the others."""
        self._sum()
        return [int(waited) for waited in self._waited]

    def operations(self) -> list[OperationTotals]:
        """In the order of the plan."""
        self._sum()
        return [
            OperationTotals(name, int(nanoseconds), work.read_bytes, work.flops)
            for name, nanoseconds, work in zip(
                self._names, self._nanoseconds, self._work.by_operation(), strict=True
            )
        ]
