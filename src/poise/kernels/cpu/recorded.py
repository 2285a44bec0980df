"""What recorded operations read and compute, for profiles and metrics.

Knows sizes, not values. Bytes are modelled, not counted: those of the packed weights and of the KV read. Flops count a
multiplication and an addition as two. Invariant: work is linear in the sizes of steps, so sums of sizes are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from poise.kernels.ops import LOGIT_TILE, Step


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes read and flops done."""

    read_bytes: int
    flops: int


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

    def add(
        self, step: Step, window: int | None, spared_keys: int = 0, wanted_only: bool = False
    ) -> None:
        """Takes a step, its keys as attention with this window sees them; `spared_keys` were served by another's pass.
        `wanted_only`: of its rows only those whose logits are asked for.
        """
        # Plain numbers: a step that decodes has few sequences, and numpy's calls would cost more than the sums.
        positions, starts = step.positions.tolist(), step.query_start.tolist()
        self.logit_rows += len(step.logit_rows)
        self.logit_tiles += -(-len(step.logit_rows) // LOGIT_TILE)
        if wanted_only and len(step.logit_rows) < len(positions):
            self._add_rows(step.logit_rows.tolist(), positions, starts, window, spared_keys)
            return
        for begin, end in pairwise(starts):
            first, rows = positions[begin], end - begin
            if window is None:
                self.keys_read += first + rows
                self.keys_attended += rows * first + rows * (rows + 1) // 2
            else:
                growing = max(
                    0, min(rows, window - first)
                )  # rows that see all keys up to their own
                self.keys_read += min(first + rows, window - 1 + rows)
                self.keys_attended += growing * first + growing * (growing + 1) // 2
                self.keys_attended += (rows - growing) * window
        self.steps += 1
        self.rows += len(positions)
        self.keys_read -= spared_keys

    def _add_rows(
        self,
        wanted: list[int],
        positions: list[int],
        starts: list[int],
        window: int | None,
        spared_keys: int,
    ) -> None:
        """Some rows of a step, each sequence's keys once."""
        read = 0
        for begin, end in pairwise(starts):
            ends = [positions[row] + 1 for row in wanted if begin <= row < end]
            if ends:
                span = max(ends) if window is None else window
                read += max(ends) - max(0, min(ends) - span)
                self.keys_attended += sum(min(end, span) for end in ends)
        self.steps += bool(wanted)
        self.rows += len(wanted)
        self.keys_read += read - min(read, spared_keys)


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
    def sizes_key(self) -> tuple[int | None, int, bool]:
        """What sizes depend on."""
        return self.window, self.kv_group, self.wanted_only

    def work(self, sizes: Sizes) -> Work:
        """Over steps whose `sizes` were taken with this operation's key."""
        passes = {"embed": sizes.rows, "logits": sizes.logit_tiles}.get(self.name, sizes.steps)
        rows = sizes.logit_rows if self.name == "logits" else sizes.rows
        return Work(
            self.weight_bytes * passes + self.bytes_per_key * sizes.keys_read,
            self.flops_per_row * rows + self.flops_per_key * sizes.keys_attended,
        )


class WorkCounter:
    """The work of all steps it was given."""

    def __init__(self, operations: Sequence[RecordedOperation]) -> None:
        self._operations = tuple(operations)
        self._sizes = {operation.sizes_key: Sizes() for operation in operations}
        self.spared_keys = 0

    def add(self, step: Step, spared_keys: Sequence[int] = ()) -> None:
        """Takes a step; `spared_keys` by KV group, none where nothing was shared."""
        self.spared_keys += sum(spared_keys)
        for (window, group, wanted_only), sizes in self._sizes.items():
            sizes.add(step, window, spared_keys[group] if spared_keys else 0, wanted_only)

    def by_operation(self) -> list[Work]:
        """In recording order."""
        return [operation.work(self._sizes[operation.sizes_key]) for operation in self._operations]

    def total(self) -> Work:
        parts = self.by_operation()
        return Work(sum(part.read_bytes for part in parts), sum(part.flops for part in parts))
