"""What recorded operations read and compute, for profiles and metrics.

Knows sizes, not values. Bytes are modelled, not counted: those of the packed weights and of the KV read. Flops count a
multiplication and an addition as two. Invariant: work is linear in the sizes of steps, so sums of sizes are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

from poise.kernels.ops import LOGIT_TILE, Step

COUNTED_TOGETHER = 32  # steps


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes read and flops done."""

    read_bytes: int
    flops: int


class Rows(NamedTuple):
    """Rows of a step. `spans`: first position and number of each sequence's; `wanted`: those whose logits are asked for.

    Plain numbers: numpy's calls, whose data has gone cold in a step, would cost more than the sums.
    """

    spans: list[tuple[int, int]]
    wanted: list[int]

    @classmethod
    def of(cls, step: Step) -> Rows:
        """Those of its arrays."""
        spans = [
            (int(step.positions[begin]), end - begin)
            for begin, end in pairwise(step.query_start.tolist())
        ]
        return cls(spans, step.logit_rows.tolist())

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows in self.spans)

    def keys(self, window: int | None) -> tuple[int, int]:
        """Keys that attention with this window reads, each sequence's once, and keys that the rows attend to."""
        read = attended = 0
        for first, rows in self.spans:
            if window is None:
                read += first + rows
                attended += rows * first + rows * (rows + 1) // 2
            else:
                growing = max(
                    0, min(rows, window - first)
                )  # rows that see all keys up to their own
                read += min(first + rows, window - 1 + rows)
                attended += growing * first + growing * (growing + 1) // 2
                attended += (rows - growing) * window
        return read, attended

    def keys_of_wanted(self, window: int | None) -> tuple[int, int]:
        """The same of the wanted rows alone."""
        read = attended = begin = 0
        for first, rows in self.spans:
            ends = [first + row - begin + 1 for row in self.wanted if begin <= row < begin + rows]
            if ends:
                span = max(ends) if window is None else window
                read += max(ends) - max(0, min(ends) - span)
                attended += sum(min(end, span) for end in ends)
            begin += rows
        return read, attended


@dataclass(slots=True)
class Sizes:
    """Sums over steps. `keys_read`: keys of each sequence, once, less those that another's pass served;
    `keys_attended`: keys that each row attends to.
    """

    steps: int = 0
    rows: int = 0
    logit_rows: int = 0
    logit_tiles: int = 0
    keys_read: int = 0
    keys_attended: int = 0

    def add(self, rows: int, logit_rows: int, keys_read: int, keys_attended: int) -> None:
        """Takes a step, or what of it an operation works on."""
        self.steps += rows > 0
        self.rows += rows
        self.logit_rows += logit_rows
        self.logit_tiles += -(-logit_rows // LOGIT_TILE)
        self.keys_read += keys_read
        self.keys_attended += keys_attended


@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """One operation of a plan. Weights are read once per step, by `logits` once per tile of rows, by `embed` once per row.
    `wanted_only`: only rows whose logits are asked for go through it.
    """

    name: str
    weight_bytes: int = 0
    flops_per_row: int = 0
    bytes_per_key: int = 0  # attention only
    flops_per_key: int = 0  # attention only
    window: int | None = None  # attention only
    kv_group: int = 0  # attention only
    wanted_only: bool = False

    @property
    def sizes_key(self) -> tuple[int | None, int]:
        """What sizes depend on, beside which rows."""
        return self.window, self.kv_group

    def work(self, sizes: Sizes) -> Work:
        """Over steps whose `sizes` were taken with this operation's key."""
        passes = {"embed": sizes.rows, "logits": sizes.logit_tiles}.get(self.name, sizes.steps)
        rows = sizes.logit_rows if self.name == "logits" else sizes.rows
        return Work(
            self.weight_bytes * passes + self.bytes_per_key * sizes.keys_read,
            self.flops_per_row * rows + self.flops_per_key * sizes.keys_attended,
        )


class WorkCounter:
    """The work of all steps it was given. They are counted many at once, as a step leaves Python's data cold (decision 15).

    One thread adds; any may read meanwhile.
    """

    def __init__(self, operations: Sequence[RecordedOperation]) -> None:
        self._operations = tuple(operations)
        self._whole = {operation.sizes_key: Sizes() for operation in operations}
        self._wanted = {o.sizes_key: Sizes() for o in operations if o.wanted_only}
        self._spared_keys = 0
        self._not_counted: deque[tuple[Rows, Sequence[int]]] = deque()
        self._counting = Lock()

    def add(self, rows: Rows, spared_keys: Sequence[int] = ()) -> None:
        """Takes a step; `spared_keys` by KV group, none where nothing was shared."""
        self._not_counted.append((rows, spared_keys))
        if len(self._not_counted) >= COUNTED_TOGETHER:
            self._count()

    def _count(self) -> None:
        with self._counting:
            while self._not_counted:
                self._count_step(*self._not_counted.popleft())

    def _count_step(self, rows: Rows, spared_keys: Sequence[int]) -> None:
        num_rows, num_wanted = rows.num_rows, len(rows.wanted)
        self._spared_keys += sum(spared_keys)
        for key, whole in self._whole.items():
            window, group = key
            spared = spared_keys[group] if spared_keys else 0
            read, attended = rows.keys(window)
            whole.add(num_rows, num_wanted, read - spared, attended)
            if key in self._wanted:
                if num_wanted < num_rows:
                    read, attended = rows.keys_of_wanted(window)
                self._wanted[key].add(num_wanted, num_wanted, read - min(read, spared), attended)

    @property
    def spared_keys(self) -> int:
        """Keys that another sequence's pass served, over all steps and KV groups."""
        self._count()
        return self._spared_keys

    def by_operation(self) -> list[Work]:
        """In recording order."""
        self._count()
        return [
            operation.work(
                (self._wanted if operation.wanted_only else self._whole)[operation.sizes_key]
            )
            for operation in self._operations
        ]

    def total(self) -> Work:
        parts = self.by_operation()
        return Work(sum(part.read_bytes for part in parts), sum(part.flops for part in parts))
