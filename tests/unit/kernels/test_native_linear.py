"""Native products and moves equal the numpy reference in all bits: each container, variant, row count and thread count."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from native_ops import (
    DOT_USES,
    FLOAT_TYPES,
    MAX_ROWS,
    NO_KV,
    PRODUCTS,
    ROW_COUNTS,
    THREADS,
    TYPES,
    assert_same_bits,
    backend,
    hostile_rows,
    rows_step,
    vector,
    weights,
)

from poise.kernels.reference import ReferenceBackend
from poise.weights.checkpoint import RawTensor

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
EPS = 1e-5
every_row_count = pytest.mark.parametrize(
    "row_counts",
    [
        pytest.param(ROW_COUNTS, id="some"),
        pytest.param(tuple(range(1, MAX_ROWS + 1)), id="all", marks=pytest.mark.slow),
    ],
)
every_type = pytest.mark.parametrize("type_name", TYPES)
every_product = pytest.mark.parametrize(("type_name", "activations"), PRODUCTS)
every_isa = pytest.mark.parametrize("isa", DOT_USES)


def shapes(type_name):
    """(outputs, columns); outputs are never whole panels, so the last one holds padding."""
    if type_name in FLOAT_TYPES:
        return [(37, 96), (5, 33), (3, 1), (17, 257)]
    if type_name.endswith("K"):
        return [(37, 256), (5, 512)]
    return [(37, 96), (5, 32), (17, 512)]


@cache
def residual_case(type_name, activations, outputs, columns):
    """(weight, a, x, expected) of linear_residual over MAX_ROWS rows."""
    weight = weights(type_name, outputs, columns, seed=outputs)
    a = hostile_rows(MAX_ROWS, columns, seed=columns)
    x = np.random.default_rng(1).normal(size=(MAX_ROWS, outputs)).astype(np.float32)
    reference = ReferenceBackend(NO_KV, activations=activations)
    return weight, a, x, reference.linear_residual(a, reference.matrix(weight), x)


@every_row_count
@every_isa
@every_product
def test_linear_residual(type_name, activations, isa, row_counts):
    for outputs, columns in shapes(type_name):
        weight, a, x, expected = residual_case(type_name, activations, outputs, columns)
        for threads in THREADS:
            native = backend(isa, threads, activations=activations)
            source, target = native.plan.buffer(columns), native.plan.buffer(outputs)
            native.linear_residual(source, native.matrix(weight), target)
            for rows in row_counts:
                native.plan.buffer_view(source, rows)[...] = a[:rows]
                native.plan.buffer_view(target, rows)[...] = x[:rows]
                native.run(rows_step(rows))
                note = f"{outputs}x{columns}, {threads} threads, {rows} rows"
                assert_same_bits(native.plan.buffer_view(target, rows), expected[:rows], note)


@every_isa
@every_product
def test_rows_that_outgrow_the_cache(type_name, activations, isa):
    """Wide rows are multiplied in several passes over the panels; the passes change no bit."""
    weight, a, x, expected = residual_case(type_name, activations, 21, 4096)
    for threads in THREADS:
        native = backend(isa, threads, activations=activations)
        source, target = native.plan.buffer(4096), native.plan.buffer(21)
        native.linear_residual(source, native.matrix(weight), target)
        for rows in (15, 16, 17, 33, 40, 70):
            native.plan.buffer_view(source, rows)[...] = a[:rows]
            native.plan.buffer_view(target, rows)[...] = x[:rows]
            native.run(rows_step(rows))
            note = f"{threads} threads, {rows} rows"
            assert_same_bits(native.plan.buffer_view(target, rows), expected[:rows], note)


@every_isa
@pytest.mark.parametrize("columns", [1, 3])
def test_products_around_the_smallest_normal_number(columns, isa):
    """Zero or 2^-126: what decides is the result rounded to 24 bits, as if the exponent had no end."""
    random = np.random.default_rng(columns)
    steps = random.integers(-4096, 4097, (53, columns)), random.integers(-4096, 4097, (70, columns))
    w, a = ((2.0**-63 * (1 + step * 2.0**-23)).astype(np.float32) for step in steps)
    w[0, 1:], w[1::3, 1:], w[2::3, 1:] = 0, 0, -w[2::3, 1:]
    w[0, 0], a[0, 0] = 2.0**-63 * (1 + 2.0**-13), 2.0**-63 * (1 - 2.0**-13)  # rounds up to 2^-126
    data = w.view(np.uint8).reshape(53, -1)
    weight = RawTensor("weight", "F32", w.shape, data)
    reference = ReferenceBackend(NO_KV)
    expected = reference.linear_residual(a, reference.matrix(weight), np.zeros((70, 53), "f4"))
    assert (expected == 0).any()
    assert (np.abs(expected) == np.float32(2.0**-126)).any()
    native = backend(isa, 2)
    source, target = native.plan.buffer(columns), native.plan.buffer(53)
    native.linear_residual(source, native.matrix(weight), target)
    native.plan.buffer_view(source, 70)[...] = a
    native.plan.buffer_view(target, 70)[...] = 0
    native.run(rows_step(70))
    assert_same_bits(native.plan.buffer_view(target, 70), expected)


MIXES = [
    ("Q4_K", "Q6_K", "Q5_K"),
    ("Q4_1", "Q8_0", "BF16"),
    ("F16", "Q4_0", "F32"),
    ("Q5_0", "BF16", "Q5_1"),
]


@cache
def norm_linear_case(mix, activations, with_biases):
    columns = 256
    random = np.random.default_rng(2)
    matrices = [weights(t, n, columns, seed=n) for t, n in zip(mix, (37, 5, 18))]
    biases = [random.normal(size=w.shape[0]).astype(np.float32) for w in matrices]
    norm = random.normal(1, 0.5, columns).astype(np.float32)
    x = hostile_rows(MAX_ROWS, columns, seed=3)
    reference = ReferenceBackend(NO_KV, activations=activations)
    handles = [reference.matrix(weight) for weight in matrices]
    expected = reference.norm_linear(x, norm, EPS, handles, biases if with_biases else None)
    return matrices, biases if with_biases else None, norm, x, expected


@pytest.mark.parametrize("with_biases", [False, True], ids=["plain", "biases"])
@every_isa
@pytest.mark.parametrize("activations", ["int8", "bf16"])
@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_norm_linear(mix, activations, isa, with_biases):
    """Several matrices of different containers on the same normed rows, side by side."""
    matrices, biases, norm, x, expected = norm_linear_case(mix, activations, with_biases)
    for threads in THREADS:
        native = backend(isa, threads, activations=activations)
        source = native.plan.buffer(x.shape[1])
        handles = [native.matrix(weight) for weight in matrices]
        vectors = None if biases is None else [native.vector(vector(b)) for b in biases]
        out = native.norm_linear(source, native.vector(vector(norm)), EPS, handles, vectors)
        for rows in ROW_COUNTS:
            native.plan.buffer_view(source, rows)[...] = x[:rows]
            native.run(rows_step(rows))
            note = f"{threads} threads, {rows} rows"
            assert_same_bits(native.plan.buffer_view(out, rows), expected[:rows], note)


@every_isa
@pytest.mark.parametrize("width", [1, 15, 17, 250, 4096, 4097, 8300])
def test_norm_sums_in_cuts(isa, width):
    """The norm of odd and of long rows, seen through one f32 output."""
    random = np.random.default_rng(width)
    x = random.normal(size=(3, width)).astype(np.float32) * np.float32([[1], [1e-19], [1e15]])
    norm = random.normal(1, 0.5, width).astype(np.float32)
    weight = weights("F32", 1, width, seed=4)
    reference = ReferenceBackend(NO_KV)
    expected = reference.norm_linear(x, norm, 1e-6, [reference.matrix(weight)])
    native = backend(isa, 2)
    source = native.plan.buffer(width)
    out = native.norm_linear(source, native.vector(vector(norm)), 1e-6, [native.matrix(weight)])
    native.plan.buffer_view(source, 3)[...] = x
    native.run(rows_step(3))
    assert_same_bits(native.plan.buffer_view(out, 3), expected)


@cache
def gated_case(type_name, activations):
    columns, hidden = (256, 256) if type_name.endswith("K") else (64, 96)
    gate, up = (weights(type_name, hidden, columns, seed) for seed in (5, 6))
    down = weights(type_name, columns, hidden, seed=7)
    random = np.random.default_rng(8)
    norm = random.normal(1, 0.5, columns).astype(np.float32)
    x = hostile_rows(MAX_ROWS, columns, seed=9)
    reference = ReferenceBackend(NO_KV, activations=activations)
    handles = [reference.matrix(weight) for weight in (gate, up, down)]
    plain = reference.gated_mlp(x, norm, EPS, *handles)
    gemma3 = reference.gated_mlp(x, norm, EPS, *handles, "gelu_tanh", norm[::-1])
    return (gate, up, down), norm, x, plain, gemma3


@every_row_count
@every_isa
@every_product
def test_gated_mlp(type_name, activations, isa, row_counts):
    matrices, norm, x, plain, gemma3 = gated_case(type_name, activations)
    for threads in THREADS:
        post_norm = ("gelu_tanh", vector(norm[::-1].copy()))
        for expected, settings in ((plain, ()), (gemma3, post_norm)):
            native = backend(isa, threads, activations=activations)
            source = native.plan.buffer(x.shape[1])
            handles = [native.matrix(weight) for weight in matrices]
            settings = [native.vector(s) if isinstance(s, RawTensor) else s for s in settings]
            native.gated_mlp(source, native.vector(vector(norm)), EPS, *handles, *settings)
            for rows in row_counts:
                native.plan.buffer_view(source, rows)[...] = x[:rows]
                native.run(rows_step(rows))
                note = f"{threads} threads, {rows} rows, {settings}"
                assert_same_bits(native.plan.buffer_view(source, rows), expected[:rows], note)


@every_isa
def test_a_norm_behind_a_projection(isa):
    weight = weights("Q5_0", 80, 64, seed=17)
    norm = np.random.default_rng(18).normal(1, 0.5, 80).astype(np.float32)
    a, x = hostile_rows(MAX_ROWS, 64, seed=19), hostile_rows(MAX_ROWS, 80, seed=20)
    reference = ReferenceBackend(NO_KV)
    expected = reference.linear_residual(a, reference.matrix(weight), x, norm, EPS)
    for threads in THREADS:
        native = backend(isa, threads)
        source, residual = native.plan.buffer(64), native.plan.buffer(80)
        handle = native.vector(vector(norm))
        native.linear_residual(source, native.matrix(weight), residual, handle, EPS)
        for rows in ROW_COUNTS:
            native.plan.buffer_view(source, rows)[...] = a[:rows]
            native.plan.buffer_view(residual, rows)[...] = x[:rows]
            native.run(rows_step(rows))
            note = f"{threads} threads, {rows} rows"
            assert_same_bits(native.plan.buffer_view(residual, rows), expected[:rows], note)


@every_isa
def test_scaled_embeddings(isa):
    table = weights("F32", 50, 32, seed=21)
    ids = np.random.default_rng(22).integers(0, 50, MAX_ROWS).astype(np.int32)
    reference = ReferenceBackend(NO_KV)
    reference.begin(rows_step(MAX_ROWS, ids))
    expected = reference.embed(reference.matrix(table), 25.298221)
    native = backend(isa, 2)
    out = native.embed(native.matrix(table), 25.298221)
    native.run(rows_step(MAX_ROWS, ids))
    assert_same_bits(native.plan.buffer_view(out, MAX_ROWS), expected)


@every_isa
@every_type
def test_embed(type_name, isa):
    """A move: also of denormals, NaN and Inf, where the table holds floats, and through a row order."""
    for outputs, columns in shapes(type_name):
        table = weights(type_name, outputs, columns, seed=10)
        if type_name in FLOAT_TYPES:
            random = np.random.default_rng(11)
            data = random.integers(0, 256, table.data.shape, np.uint8)
            table = replace(table, data=data)
        order = np.random.default_rng(12).permutation(outputs).astype(np.int32)
        ids = np.random.default_rng(13).integers(0, outputs, MAX_ROWS).astype(np.int32)
        for ordered in (table, replace(table, row_order=order)):
            reference = ReferenceBackend(NO_KV)
            reference.begin(rows_step(MAX_ROWS, ids))
            expected = reference.embed(reference.matrix(ordered))
            for threads in THREADS:
                native = backend(isa, threads)
                out = native.embed(native.matrix(ordered))
                native.run(rows_step(MAX_ROWS, ids))
                note = f"{outputs}x{columns}, {threads} threads"
                assert_same_bits(native.plan.buffer_view(out, MAX_ROWS), expected, note)


@every_isa
@every_product
def test_logits(type_name, activations, isa):
    """Norm and output matrix for any subset of rows, over more rows than one tile of logits holds."""
    columns = 256
    output = weights(type_name, 37, columns, seed=14)
    norm = np.random.default_rng(15).normal(1, 0.5, columns).astype(np.float32)
    x = hostile_rows(MAX_ROWS, columns, seed=16)
    reference = ReferenceBackend(NO_KV, activations=activations)
    reference.begin(rows_step(MAX_ROWS, logit_rows=range(MAX_ROWS)))
    reference.logits(x, norm, EPS, reference.matrix(output))
    expected = reference._logits
    wanted = [[0], [69], range(1, 32), range(32), range(33), range(0, 70, 3), range(70)]
    for threads in THREADS:
        native = backend(isa, threads, activations=activations)
        source = native.plan.buffer(columns)
        native.logits(source, native.vector(vector(norm)), EPS, native.matrix(output))
        for rows in wanted:
            native.plan.buffer_view(source, MAX_ROWS)[...] = x
            actual = np.empty((len(rows), 37), np.float32)
            native.run(rows_step(MAX_ROWS, logit_rows=rows), logits=actual)
            assert_same_bits(actual, expected[list(rows)], f"{threads} threads, rows {rows}")
