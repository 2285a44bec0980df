"""What the native side refuses, naming the value, before anything of a step has run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from native_ops import ISAS, backend, pool, rows_step, vector, weights

from poise.kernels.cpu import native
from poise.kernels.cpu.backend import CPUBackend
from poise.kernels.ops import KVShape, RopeTable, Step

KV = KVShape(1, 1, 16, 16, 4)
MAX_ROWS = 8


@pytest.fixture(scope="module")
def model() -> CPUBackend:
    """One layer over two heads of 16 and a vocabulary of 20."""
    ops = backend(ISAS[-1], 2, KV, max_rows=MAX_ROWS)
    norm = ops.vector(vector(np.ones(32)))
    table = ops.matrix(weights("F32", 20, 32, seed=1))
    x = ops.embed(table)
    qkv = ops.norm_linear(x, norm, 1e-5, [ops.matrix(weights("F32", 64, 32, seed=2))])
    q = ops.rope_kv_write(qkv, RopeTable(np.ones(8, np.float32)), 0, 2, 1, 16)
    x = ops.linear_residual(ops.attention(q, 0), ops.matrix(weights("Q8_0", 32, 32, seed=3)), x)
    ops.logits(x, norm, 1e-5, table)
    return ops


def good_step() -> Step:
    step = rows_step(3, np.array([1, 2, 19], np.int32), logit_rows=[0, 2])
    step.block_tables = np.array([[3, 0]], np.int32)
    return step


def changed(field: str, value) -> Step:
    return replace(good_step(), **{field: np.array(value, np.int32)})


def logits_of(model, step):
    result = np.empty((len(step.logit_rows), 20), np.float32)
    model.run(step, logits=result)
    return result


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (changed("token_ids", [1, 20, 2]), "token id 20"),
        (changed("token_ids", [1, -1, 2]), "token id -1"),
        (changed("positions", [-1, 0, 1]), "position -1"),
        (changed("positions", [0, 2, 3]), "position 2"),
        (changed("positions", [30, 31, 32]), "block table length 2"),
        (changed("block_tables", [[4, 0]]), "block id 4"),
        (changed("block_tables", [[-1, 0]]), "block id -1"),
        (changed("logit_rows", [3]), "logit row 3"),
        (changed("query_start", [0, 2]), "sequence count 1"),
        (changed("query_start", [1, 3]), "sequence count 1"),
        (rows_step(MAX_ROWS + 1), f"row count {MAX_ROWS + 1}"),
    ],
)  # fmt: skip
def test_a_step_out_of_range_is_refused(model, step, message):
    before = logits_of(model, good_step())
    pages = model.pages.view().copy()
    with pytest.raises(ValueError, match=message):
        logits_of(model, step)
    assert np.array_equal(model.pages.view(), pages)
    assert np.array_equal(logits_of(model, good_step()), before)


def test_an_empty_sequence_is_refused(model):
    step = changed("query_start", [0, 3, 3])
    step.block_tables = np.zeros((2, 1), np.int32)
    with pytest.raises(ValueError, match="rows of sequence 1"):
        logits_of(model, step)


def test_results_of_the_wrong_shape_are_refused(model):
    with pytest.raises(ValueError, match="logits"):
        model.run(good_step(), logits=np.empty((2, 19), np.float32))
    with pytest.raises(ValueError, match="sampling"):
        model.run(good_step(), sampling=np.zeros(1, np.uint8), results=np.zeros(1, np.uint8))


@pytest.mark.parametrize(
    ("type_name", "columns", "width", "message"),
    [
        ("Q3_K", 256, 110, "Q3_K"),
        ("Q4_0", 33, 18, "33 columns"),
        ("Q4_K", 128, 72, "128 columns"),
        ("F32", 4, 15, "4 columns"),
        ("F32", 0, 0, "0 columns"),
    ],
)
def test_a_matrix_that_does_not_fit_is_refused(type_name, columns, width, message):
    data = np.zeros((2, width), np.uint8)
    with pytest.raises(ValueError, match=message):
        native.pack(pool(1), native.Arena(), type_name, data, columns, None)


@pytest.mark.parametrize("order", [[0], [0, 2], [-1, 0]])
def test_a_row_order_outside_the_matrix_is_refused(order):
    data = np.zeros((2, 4), np.uint8)
    with pytest.raises(ValueError, match="row_order"):
        native.pack(pool(1), native.Arena(), "F32", data, 1, np.array(order, np.int32))


def test_unknown_activations_are_refused():
    with pytest.raises(ValueError, match="int4"):
        native.pack(pool(1), native.Arena(), "F32", np.zeros((1, 4), np.uint8), 1, None, "int4")


def test_geometry_that_pages_cannot_have_is_refused():
    with pytest.raises(ValueError, match="head_dim 24"):
        native.Pages(1, 1, 24, 16, 1)
    with pytest.raises(ValueError, match="block_size 8"):
        native.Pages(1, 1, 16, 8, 1)
    with pytest.raises(ValueError, match="block"):
        native.Pages(1, 1, 16, 16, 1).fill(1, 0)
    with pytest.raises(ValueError, match="unknown KV type fp8: bf16 or int8"):
        native.Pages(1, 1, 16, 16, 1, "fp8")


def test_memory_found_early_changes_no_page():
    pages = native.Pages(2, 1, 64, 16, 100)
    pages.fill(3, 0xAB)
    pages.populate(1, 99)
    pages.populate(0, 0)
    view = pages.view()
    assert (view[3] == 0xAB).all()
    assert not view[[0, 1, 2, 4, 99]].any()
    for first, count in ((-1, 1), (0, 101), (100, 1), (0, -1)):
        with pytest.raises(ValueError, match="no such blocks"):
            pages.populate(first, count)


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="sse2"):
        backend("sse2", 1)


def test_matrices_that_do_not_fit_each_other_are_refused():
    ops = backend(ISAS[-1], 1)
    narrow, wide = ops.plan.buffer(32), ops.plan.buffer(64)
    norm = ops.vector(vector(np.ones(32)))
    matrix = ops.matrix(weights("F32", 64, 32, seed=4))
    for record in (
        lambda: ops.linear_residual(wide, matrix, narrow),
        lambda: ops.norm_linear(wide, norm, 1e-5, [matrix]),
        lambda: ops.gated_mlp(narrow, norm, 1e-5, matrix, matrix, matrix),
        lambda: ops.logits(wide, norm, 1e-5, matrix),
        lambda: ops.norm_linear(narrow, norm, 1e-5, [matrix], [norm]),
    ):
        with pytest.raises(ValueError, match="shapes do not fit"):
            record()
