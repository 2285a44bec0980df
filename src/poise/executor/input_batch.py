"""The arrays of a step: rows, positions, block tables and sampling records, from what the scheduler sent.

Holds per request its tokens, its block tables and its sampling state between steps. Knows no model.
Invariant: `tokens[:num_known]` are the request's known tokens, behind them lie at most the drafts of the step that
runs, and arrays never move while a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from poise.core.output import NewRequest, ScheduledRequest, SchedulerOutput
from poise.kernels.cpu.recorded import Rows
from poise.kernels.ops import Step
from poise.sampling.rows import (
    NO_LOGPROBS,
    RESULT_TYPE,
    ROW_TYPE,
    Records,
    SamplingRows,
    SamplingState,
    fill_target,
)

Int32s = NDArray[np.int32]
NO_DRAFT = -1


@dataclass(slots=True)
class RequestState:
    """One request as the executor holds it."""

    tokens: Int32s
    token_at: memoryview  # the same, for single ones
    num_known: int
    num_prompt: int
    block_tables: Int32s  # [KV groups, blocks]
    num_blocks: int
    tables_version: int  # a number for each content that the block tables of any request ever had
    sampling: SamplingState
    wants_logprobs: bool
    prompt_logprobs: (
        int | None
    )  # how many alternatives at each prompt position; None: not asked for
    drafts_by_model: bool = False  # another model's, with KV of its own
    draft_end: int | None = (
        None  # positions before it have that model's KV; None: none was ever computed
    )


class DraftRows(NamedTuple):
    """Rows of one request for the model that drafts: its tokens at start … end − 1, drafts among them."""

    request_id: int
    start: int
    end: int


class LogitRow(NamedTuple):
    """What one row of logits is for: drawing a token, or scoring a prompt token.

    `place`: 0 for the row of the last known token, j for that of draft j − 1, whose draw counts only if all drafts up
    to it were drawn. `draft`: the draft that stands where this row's token goes, NO_DRAFT behind the last.
    """

    request_id: int
    draws: bool
    place: int = 0
    draft: int = NO_DRAFT


@dataclass(frozen=True, slots=True)
class Batch:
    """A step ready to run; `logit_rows[i]` tells what sampling record and result `i` are for. Its arrays are those of the
    next step of this shape, too. `result_view` are the bytes of the results, for Python to read.
    """

    step: Step
    logit_rows: list[LogitRow]
    sampling: NDArray[np.uint8]
    result_bytes: NDArray[np.uint8]
    result_view: memoryview
    rows: Rows

    @property
    def results(self) -> Records:
        """The results by field."""
        return self.result_bytes.view(RESULT_TYPE)


class _Arrays(NamedTuple):
    """What a step and its batch are made of, block tables apart."""

    token_ids: Int32s
    positions: Int32s
    query_start: Int32s
    logit_rows: Int32s
    sampling: NDArray[np.uint8]
    result_bytes: NDArray[np.uint8]
    result_view: memoryview


class InputBatch:
    """Keeps request states and fills the arrays of each step."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_rows: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        num_draft_groups: int = 0,
    ) -> None:
        """`num_draft_groups`: of the KV groups, the last ones, which another model drafts with."""
        self.max_rows = max_rows
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self._states: dict[int, RequestState] = {}
        self._token_ids = np.zeros(max_rows, np.int32)
        self._positions = np.zeros(max_rows, np.int32)
        self._logit_indices = np.zeros(max_rows, np.int32)
        self._counting = np.arange(max_model_len + 1, dtype=np.int32)
        self._query_start = np.zeros(max_num_seqs + 1, np.int32)
        self._block_tables = np.zeros((max_num_seqs, num_groups, max_blocks), np.int32)
        self._groups = slice(num_groups - num_draft_groups)
        self._draft_groups = slice(num_groups - num_draft_groups, num_groups)
        self._rows = SamplingRows(max_rows)
        self._sampling_bytes = self._rows.records.view(np.uint8)
        self._result_bytes = np.zeros(max_rows * RESULT_TYPE.itemsize, np.uint8)
        # With its data gone cold in a step, each of numpy's calls costs microseconds: single numbers go through
        # memoryviews, and the arrays of a step are kept for the next one of its shape.
        self._token_at = self._token_ids.data
        self._position_at = self._positions.data
        self._query_start_at = self._query_start.data
        self._logit_index_at = self._logit_indices.data
        self._last_arrays: tuple[tuple[int, int, int], _Arrays] | None = None
        self._versions = count()
        self._versions_in_place = [-1] * max_num_seqs  # which content each row of block tables has
        self._last_tables: tuple[tuple[int, slice, int], Int32s] | None = None

    def __getitem__(self, request_id: int) -> RequestState:
        return self._states[request_id]

    def apply(self, output: SchedulerOutput) -> None:
        """Takes the scheduler's changes: who is gone, who is new, which pages and drafts are whose."""
        for request_id in output.removed_request_ids:
            self._states.pop(request_id, None)
        for new in output.new_requests:
            self._states[new.request_id] = self._new_state(new)
        for scheduled in output.scheduled:
            if any(scheduled.new_block_ids) or any(scheduled.draft_block_ids):
                self._extend(scheduled)
            if scheduled.draft_token_ids:
                state = self._states[scheduled.request_id]
                end = state.num_known + scheduled.num_drafts
                state.tokens[state.num_known : end] = scheduled.draft_token_ids

    def build(self, output: SchedulerOutput) -> Batch:
        """Lays out the step's rows in the scheduler's order; its changes have been applied, all drafts are placed."""
        row = 0
        spans: list[tuple[int, int]] = []
        logit_rows: list[LogitRow] = []
        most_blocks = 1
        for i, scheduled in enumerate(output.scheduled):
            request_id, start, num_rows = scheduled.request_id, scheduled.start, scheduled.num_rows
            state = self._states[request_id]
            end, last = row + num_rows, start + num_rows
            spans.append((start, num_rows))
            if num_rows == 1:
                self._token_at[row] = state.token_at[start]
                self._position_at[row] = start
            else:
                self._token_ids[row:end] = state.tokens[start:last]
                self._positions[row:end] = self._counting[start:last]
            if self._versions_in_place[i] != state.tables_version:
                self._place_tables(i, state)
            if state.num_blocks > most_blocks:
                most_blocks = state.num_blocks
            if state.prompt_logprobs is not None:
                for position in range(start, min(last, state.num_prompt - 1)):
                    fill_target(
                        self._rows,
                        len(logit_rows),
                        state.token_at[position + 1],
                        state.prompt_logprobs,
                    )
                    self._logit_index_at[len(logit_rows)] = row + position - start
                    logit_rows.append(LogitRow(request_id, False))
            if scheduled.samples:
                for place in range(scheduled.num_drafts + 1):
                    known = state.num_known + place
                    is_last = place == scheduled.num_drafts
                    draft = NO_DRAFT if is_last else state.token_at[known]
                    row_index = len(logit_rows)
                    verified = scheduled.unplaced_draft if is_last else draft
                    state.sampling.fill(self._rows, row_index, state.tokens, known, place, verified)
                    self._logit_index_at[row_index] = end - 1 - scheduled.num_drafts + place
                    logit_rows.append(LogitRow(request_id, True, place, draft))
            row = end
            self._query_start_at[i + 1] = row
        return self._batch(spans, row, most_blocks, logit_rows, self._groups)

    def build_drafts(
        self, requests: Sequence[DraftRows], *, own_groups: bool, draws: bool
    ) -> Batch:
        """Lays out a step of the model that drafts. If it `draws`, result i is the token behind the rows of request i."""
        row = 0
        spans: list[tuple[int, int]] = []
        logit_rows: list[LogitRow] = []
        most_blocks = 1
        for i, (request_id, start, last) in enumerate(requests):
            state = self._states[request_id]
            end = row + last - start
            spans.append((start, last - start))
            self._token_ids[row:end] = state.tokens[start:last]
            self._positions[row:end] = self._counting[start:last]
            if self._versions_in_place[i] != state.tables_version:
                self._place_tables(i, state)
            most_blocks = max(most_blocks, state.num_blocks)
            if draws:
                place = last - state.num_known
                state.sampling.fill(self._rows, i, state.tokens, last, place)
                self._rows.records[i]["num_logprobs"] = NO_LOGPROBS
                self._logit_index_at[i] = end - 1
                logit_rows.append(LogitRow(request_id, True, place))
            row = end
            self._query_start_at[i + 1] = row
        groups = self._draft_groups if own_groups else self._groups
        return self._batch(spans, row, most_blocks, logit_rows, groups)

    def _place_tables(self, i: int, state: RequestState) -> None:
        """Makes the block tables of sequence `i` those of a request."""
        self._block_tables[i, :, : state.num_blocks] = state.block_tables[:, : state.num_blocks]
        self._versions_in_place[i] = state.tables_version
        self._last_tables = None

    def _tables(self, num_sequences: int, groups: slice, most_blocks: int) -> Int32s:
        """int32 [num_sequences, groups · most_blocks]; the last step's, if nothing has moved."""
        shape = (num_sequences, groups, most_blocks)
        if self._last_tables is None or self._last_tables[0] != shape:
            tables = np.ascontiguousarray(self._block_tables[:num_sequences, groups, :most_blocks])
            self._last_tables = (
                shape,
                tables.reshape(num_sequences, tables.shape[1] * most_blocks),
            )
        return self._last_tables[1]

    def _batch(
        self,
        spans: list[tuple[int, int]],
        num_rows: int,
        most_blocks: int,
        logit_rows: list[LogitRow],
        groups: slice,
    ) -> Batch:
        """What the arrays hold for rows in these spans; the block tables are those of some KV groups."""
        shape = (len(spans), num_rows, len(logit_rows))
        if self._last_arrays is None or self._last_arrays[0] != shape:
            self._last_arrays = (shape, self._arrays(*shape))
        arrays = self._last_arrays[1]
        tables = self._tables(len(spans), groups, most_blocks)
        step = Step(
            arrays.token_ids, arrays.positions, arrays.query_start, tables, arrays.logit_rows
        )
        return Batch(
            step,
            logit_rows,
            arrays.sampling,
            arrays.result_bytes,
            arrays.result_view,
            Rows(spans, self._logit_index_at[: len(logit_rows)].tolist()),
        )

    def _arrays(self, num_sequences: int, num_rows: int, num_logit_rows: int) -> _Arrays:
        result_bytes = self._result_bytes[: num_logit_rows * RESULT_TYPE.itemsize]
        return _Arrays(
            self._token_ids[:num_rows],
            self._positions[:num_rows],
            self._query_start[: num_sequences + 1],
            self._logit_indices[:num_logit_rows],
            self._sampling_bytes[: num_logit_rows * ROW_TYPE.itemsize],
            result_bytes,
            result_bytes.data,
        )

    def append(self, request_id: int, token_id: int) -> RequestState:
        """Makes a drawn token known; returns whose it is."""
        state = self._states[request_id]
        if state.num_known < len(state.token_at):
            state.token_at[state.num_known] = token_id
        state.num_known += 1
        return state

    def settle(self, scheduled: ScheduledRequest) -> None:
        """The request's tokens of a step with drafts are known: pages past the last but one are not its own any more."""
        self._trim(scheduled.request_id, self._states[scheduled.request_id].num_known - 1)

    def undo(self, scheduled: ScheduledRequest) -> None:
        """A step with drafts is to be computed again: pages past those of earlier steps are not its own any more."""
        self._trim(scheduled.request_id, scheduled.start)

    def _trim(self, request_id: int, num_computed: int) -> None:
        state = self._states[request_id]
        state.num_blocks = -(-num_computed // self._block_size)
        if state.draft_end is not None:
            state.draft_end = min(state.draft_end, num_computed)

    def _new_state(self, new: NewRequest) -> RequestState:
        params, speculation = new.sampling.params, new.sampling.speculation
        num_known = len(new.token_ids)
        tokens = np.zeros(self._max_model_len + 1, np.int32)
        tokens[:num_known] = new.token_ids
        tables = np.zeros(self._block_tables.shape[1:], np.int32)
        num_blocks = len(new.block_tables[0])
        tables[:, :num_blocks] = new.block_tables
        return RequestState(
            tokens=tokens,
            token_at=tokens.data,
            num_known=num_known,
            num_prompt=new.num_prompt_tokens,
            block_tables=tables,
            num_blocks=num_blocks,
            tables_version=next(self._versions),
            sampling=SamplingState(new.sampling, self._vocab_size, new.num_prompt_tokens),
            wants_logprobs=params.logprobs is not None,
            prompt_logprobs=params.prompt_logprobs,
            drafts_by_model=speculation is not None and speculation.method == "draft_model",
        )

    def _extend(self, scheduled: ScheduledRequest) -> None:
        state = self._states[scheduled.request_id]
        for block_ids in (scheduled.new_block_ids, scheduled.draft_block_ids):
            num_new = len(block_ids[0]) if block_ids else 0
            if num_new:
                end = state.num_blocks + num_new
                state.block_tables[:, state.num_blocks : end] = block_ids
                state.num_blocks = end
                state.tables_version = next(self._versions)
