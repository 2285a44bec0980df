"""The arrays of a step: rows in the scheduler's order, tables that grow, requests that come back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scheduler_outputs import new, output, rows

from poise.core.output import ScheduledRequest, SchedulerOutput
from poise.executor.input_batch import Batch, InputBatch, LogitRow
from poise.kernels.cpu.recorded import Rows
from poise.sampling.rows import ROW_TYPE, outcomes


@pytest.fixture
def batch():
    return input_batch(num_groups=1)


def input_batch(num_groups):
    return InputBatch(
        vocab_size=100,
        max_rows=64,
        max_num_seqs=4,
        max_model_len=80,
        block_size=16,
        num_groups=num_groups,
    )


def records_of(built):
    return built.sampling.view(ROW_TYPE).reshape(-1)


def build(batch: InputBatch, step: SchedulerOutput) -> Batch:
    batch.apply(step)
    built = batch.build(step)
    assert built.rows == Rows.of(built.step)
    assert len(built.results) == len(built.logit_rows)
    return built


def test_rows_stand_in_the_schedulers_order(batch):
    built = build(
        batch,
        output(
            [rows(7, 0, 3, samples=True), rows(5, 2, 2)],
            [new(5, range(50, 60), [4]), new(7, [70, 71, 72], [9])],
        ),
    )
    step = built.step
    assert step.token_ids.tolist() == [70, 71, 72, 52, 53]
    assert step.positions.tolist() == [0, 1, 2, 2, 3]
    assert step.query_start.tolist() == [0, 3, 5]
    assert step.block_tables.tolist() == [[9], [4]]
    assert step.logit_rows.tolist() == [2]
    assert built.logit_rows == [LogitRow(7, True)]
    arrays = (step.token_ids, step.positions, step.query_start, step.block_tables, step.logit_rows)
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)


def test_a_drawn_token_is_the_next_input(batch):
    build(batch, output([rows(1, 0, 2, samples=True)], [new(1, [10, 11], [3])]))
    batch.append(1, 42)
    built = build(batch, output([rows(1, 2, 1, samples=True)]))
    assert built.step.token_ids.tolist() == [42]
    assert built.step.positions.tolist() == [2]
    assert records_of(built)["position"].tolist() == [3]  # of the token to be drawn


def test_arrays_of_an_earlier_shape_hold_the_new_step(batch):
    """A step of a shape that ran before, and of one with other numbers of rows in between."""
    both = [new(1, [10, 11, 12], [3]), new(2, [20, 21], [4])]
    build(batch, output([rows(1, 0, 1), rows(2, 0, 1)], both))
    build(batch, output([rows(1, 1, 2, samples=True)]))
    built = build(batch, output([rows(2, 1, 1, samples=True), rows(1, 2, 1, samples=True)]))
    assert built.step.token_ids.tolist() == [21, 12]
    assert built.step.positions.tolist() == [1, 2]
    assert built.step.block_tables.tolist() == [[4], [3]]
    built.results["status"] = [0, 1]
    built.results["token_id"] = [42, -1]
    assert list(outcomes(built.result_view)) == [(0, 42), (1, -1)]


def test_block_tables_grow_and_rows_of_shorter_ones_stay_in_range(batch):
    build(
        batch, output([rows(1, 0, 16), rows(2, 0, 1)], [new(1, range(40), [3]), new(2, [5], [8])])
    )
    built = build(batch, output([rows(1, 16, 20, [6, 1]), rows(2, 1, 1)]))
    assert built.step.block_tables[0].tolist() == [3, 6, 1]
    assert built.step.block_tables[1, 0] == 8
    built = build(batch, output([rows(1, 36, 1, [])]))
    assert built.step.block_tables.tolist() == [[3, 6, 1]]


def test_tables_of_the_last_step_are_not_kept_where_other_pages_took_their_place(batch):
    built = build(batch, output([rows(1, 0, 2)], [new(1, range(40), [3])]))
    assert built.step.block_tables.tolist() == [[3]]
    built = build(batch, output([rows(1, 0, 2)], [new(1, range(40), [9])], removed=[1]))
    assert built.step.block_tables.tolist() == [[9]]
    built = build(batch, output([rows(2, 0, 2)], [new(2, range(40), [3])], removed=[1]))
    assert built.step.block_tables.tolist() == [[3]]


def test_pages_of_drafts_give_way_to_others(batch):
    prompt = list(range(16))

    def drafted(page):
        return ScheduledRequest(1, 15, 1, ((),), True, 1, (7,), ((page,),))

    build(batch, output([rows(1, 0, 15)], [new(1, prompt, [3])]))
    assert build(batch, output([drafted(5)])).step.block_tables.tolist() == [[3, 5]]
    batch.undo(drafted(5))
    assert build(batch, output([drafted(8)])).step.block_tables.tolist() == [[3, 8]]


def test_a_start_that_jumps_over_blocks_found_in_the_cache(batch):
    """The first chunk was computed; then the next blocks turned out to be known, and `start` skips them."""
    build(batch, output([rows(1, 0, 16)], [new(1, range(60), [2])]))
    built = build(batch, output([rows(1, 48, 12, [11, 12, 5], samples=True)]))
    assert built.step.token_ids.tolist() == list(range(48, 60))
    assert built.step.positions.tolist() == list(range(48, 60))
    assert built.step.block_tables.tolist() == [[2, 11, 12, 5]]
    assert built.step.logit_rows.tolist() == [11]


def test_a_prefix_hit_starts_a_new_request_late(batch):
    built = build(batch, output([rows(1, 32, 3)], [new(1, range(40), [7, 3, 9])]))
    assert built.step.token_ids.tolist() == [32, 33, 34]
    assert built.step.block_tables.tolist() == [[7, 3, 9]]


def test_a_preempted_request_comes_back_with_its_output(batch):
    build(batch, output([rows(1, 0, 2, samples=True)], [new(1, [10, 11], [3, 4])]))
    batch.append(1, 42)
    build(batch, output([rows(2, 0, 1)], [new(2, [1], [3])], removed=[1]))
    with pytest.raises(KeyError):
        batch[1]
    back = new(1, [10, 11, 42], [5], num_prompt=2, frequency_penalty=0.5)
    built = build(batch, output([rows(1, 0, 3, samples=True)], [back]))
    assert built.step.token_ids.tolist() == [10, 11, 42]
    assert built.step.block_tables.tolist() == [[5]]
    record = records_of(built)[0]
    assert record["position"] == 3
    assert (record["num_prompt_tokens"], record["num_output_tokens"]) == (2, 1)


def test_removed_and_new_under_the_same_id_in_one_step(batch):
    build(batch, output([rows(1, 0, 2)], [new(1, [10, 11, 12], [3])]))
    built = build(batch, output([rows(1, 0, 1)], [new(1, [20], [6])], removed=[1]))
    assert built.step.token_ids.tolist() == [20]
    assert built.step.block_tables.tolist() == [[6]]


def test_prompt_logprobs_score_each_next_prompt_token(batch):
    """In chunks; the last prompt row draws, and rows behind the prompt score nothing."""
    request = new(1, [10, 11, 12, 13, 14], [3], prompt_logprobs=2)
    built = build(batch, output([rows(2, 0, 2), rows(1, 0, 2)], [new(2, [1, 2, 3], [4]), request]))
    assert built.step.logit_rows.tolist() == [2, 3]
    assert built.logit_rows == [LogitRow(1, False)] * 2
    assert records_of(built)["target"].tolist() == [11, 12]
    assert records_of(built)["num_logprobs"].tolist() == [2, 2]
    built = build(batch, output([rows(1, 2, 3, samples=True)]))
    assert built.step.logit_rows.tolist() == [0, 1, 2]
    assert built.logit_rows == [LogitRow(1, False)] * 2 + [LogitRow(1, True)]
    assert records_of(built)["target"].tolist() == [13, 14, -1]
    batch.append(1, 50)
    built = build(batch, output([rows(1, 5, 1, samples=True)]))
    assert built.logit_rows == [LogitRow(1, True)]


def test_tokens_up_to_the_last_position(batch):
    """A request that fills the context: the token drawn behind it has a place too."""
    build(batch, output([rows(1, 16, 64, samples=True)], [new(1, range(80), range(5))]))
    batch.append(1, 7)
    assert batch[1].tokens[80] == 7
    assert batch[1].num_known == 81


def test_nothing_scheduled(batch):
    built = build(batch, output([], removed=[3]))
    assert len(built.step.token_ids) == 0
    assert built.logit_rows == []


def test_tables_of_two_groups_lie_side_by_side():
    """Each group grows on its own; what a group has lost behind its window is -1 or stale."""
    batch = input_batch(num_groups=2)
    first = replace(new(1, range(40), []), block_tables=((3, 6), (-1, 9)))
    built = build(batch, output([rows(1, 16, 16)], [first]))
    assert built.step.block_tables.tolist() == [[3, 6, -1, 9]]
    grown = rows(1, 32, 8)._replace(new_block_ids=((1,), (2,)))
    other = replace(new(2, [5], []), block_tables=((4,), (8,)))
    built = build(batch, output([grown, rows(2, 0, 1)], [other]))
    tables = built.step.block_tables
    assert tables[0].tolist() == [3, 6, 1, -1, 9, 2]
    assert tables[1, [0, 3]].tolist() == [4, 8]
    assert tables.flags.c_contiguous
