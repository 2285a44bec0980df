"""Each operation of the exact reference against a slow twin in rational arithmetic, and against float64."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import rational_float32 as rational
import tiny_llama

from poise.kernels import reference_exact, reference_float
from poise.kernels import reference_math as math
from poise.kernels.ops import RopeTable
from poise.kernels.reference import ReferenceBackend
from poise.kernels.reference_containers import FloatWeights, unpack
from poise.weights.checkpoint import RawTensor

INTEGER_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def random_blocks(type_name, rows, columns, seed=0):
    """Random levels with scales of a sane size."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for offset in halves.get(type_name, (0,)):
        scale = rng.normal(0, 0.01, (rows, columns // block, 1)).astype(np.float16)
        data[..., offset : offset + 2] = scale.view(np.uint8)
    return RawTensor("weight", type_name, (rows, columns), data.reshape(rows, -1))


def extreme_rows(columns):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, columns)).astype(np.float32)
    x[1, :32] = 0
    x[2] *= np.float32(1e-30)
    x[3, 5] = 3e30
    x[4, 32:64] = 1e-41
    return x


def slow_integer_product(a, weights):
    q, d, sums = math.quantise(a[np.newaxis])
    outputs = []
    for row in range(len(weights.levels)):
        acc = 0.0
        for group in range(len(weights.scales[row])):
            columns = range(group * weights.group, (group + 1) * weights.group)
            integer = sum(
                (int(weights.levels[row, k]) - weights.zero) * int(q[0, k // 32, k % 32])
                for k in columns
            )
            scale = d[0, columns[0] // 32]
            acc = rational.fma(integer, rational.multiply(weights.scales[row, group], scale), acc)
            if weights.minima is not None:
                offset = rational.multiply(scale, sums[0, columns[0] // 32])
                acc = rational.fma(weights.minima[row, group], offset, acc)
        outputs.append(acc)
    return outputs


@pytest.mark.parametrize("type_name", INTEGER_TYPES)
def test_integer_product(type_name):
    weights = unpack(random_blocks(type_name, 7, 512))
    a = extreme_rows(512)
    product = reference_exact.IntegerMatrix(weights).product(a)
    assert rational.same(product, [slow_integer_product(row, weights) for row in a])
    exact = a.astype(np.float64) @ weights.dequantise().T.astype(np.float64)
    limit = np.abs(a).max(axis=1) * np.abs(weights.dequantise()).sum(axis=1).max() / 254
    assert (np.abs(product - exact) <= 1.01 * limit[:, np.newaxis]).all()


def slow_grouped_product(a, weights):
    """bf16 activations on one row: docs/NUMERICS.md, read aloud."""
    a = math.round_bf16(a)
    sums = math.row_sum(a.reshape(-1, 32))
    outputs = []
    for row in range(len(weights.levels)):
        acc = 0.0
        for group in range(len(weights.scales[row])):
            columns = range(group * weights.group, (group + 1) * weights.group)
            levels = [int(weights.levels[row, k]) - weights.zero for k in columns]
            partial = slow_dot(list(zip(levels, a[columns.start : columns.stop])), 0.0)
            acc = rational.fma(partial, weights.scales[row, group], acc)
            if weights.minima is not None:
                acc = rational.fma(weights.minima[row, group], sums[columns[0] // 32], acc)
        outputs.append(acc)
    return outputs


@pytest.mark.parametrize("type_name", INTEGER_TYPES)
def test_product_with_bf16_activations(type_name):
    weights = unpack(random_blocks(type_name, 7, 512))
    a = extreme_rows(512)
    product = reference_exact.pack(weights, "bf16").product(a)
    assert rational.same(product, [slow_grouped_product(row, weights) for row in a])
    exact = math.round_bf16(a).astype(np.float64) @ weights.dequantise().T.astype(np.float64)
    limit = np.abs(a).max(axis=1) * np.abs(weights.dequantise()).sum(axis=1).max() * 2.0**-19
    assert (np.abs(product - exact) <= limit[:, np.newaxis]).all()


@pytest.mark.parametrize("activations", ["int8", "bf16"])
@pytest.mark.parametrize("type_name", INTEGER_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_activation_breaks_its_row_alone(type_name, bad, activations):
    weights = reference_exact.pack(unpack(random_blocks(type_name, 7, 512)), activations)
    a = extreme_rows(512)
    sick = a.copy()
    sick[2, 300] = bad
    healthy, product = weights.product(a), weights.product(sick)
    assert not np.isfinite(product[2]).any()
    others = [0, 1, 3, 4]
    assert np.array_equal(product[others].view(np.uint32), healthy[others].view(np.uint32))


@pytest.mark.parametrize("width", [64, 33])
def test_float_products(width):
    rng = np.random.default_rng(2)
    values = rng.normal(size=(5, width)).astype(np.float32)
    values[0, :3] = [1e-40, -1e-40, 1e-38]
    a = rng.normal(size=(3, width)).astype(np.float32)
    a[1] *= np.float32(1e-37)
    a[2, 2] = 1e-41

    def slow(row, weight, order):
        acc = 0.0
        for k in order:
            acc = rational.fma(weight[k], row[k], acc)
        return acc

    product = reference_exact.FloatMatrix(FloatWeights(values, "F32")).product(a)
    expected = [[slow(row, weight, range(width)) for weight in values] for row in a]
    assert rational.same(product, expected)

    rounded = math.round_bf16(values)
    order = [k for k in np.arange(width + width % 2).reshape(-1, 2)[:, ::-1].flat if k < width]
    product = reference_exact.FloatMatrix(FloatWeights(rounded, "BF16")).product(a)
    bf16 = math.round_bf16(a)
    assert rational.same(product, [[slow(row, w, order) for w in rounded] for row in bf16])


def test_tiles_change_no_bit(monkeypatch):
    a = np.random.default_rng(3).normal(size=(70, 64)).astype(np.float32)
    for type_name, activations in (
        ("Q4_1", "int8"),
        ("Q4_1", "bf16"),
        ("BF16", "int8"),
        ("F16", "int8"),
    ):
        values = np.random.default_rng(4).normal(size=(50, 64))
        matrix = reference_exact.pack(unpack(tiny_llama.raw(values, type_name)), activations)
        whole = matrix.product(a)
        with monkeypatch.context() as patch:
            patch.setattr(reference_exact, "TILE_TERMS", 3000)
            patch.setattr(reference_exact, "TILE_ROWS", 7)
            assert np.array_equal(matrix.product(a), whole)


def attention_inputs(tokens, rows, heads=2, kv_heads=1, head_dim=6, spread=2.0):
    rng = np.random.default_rng(tokens)
    q = math.round_bf16(rng.normal(0, spread, (rows, heads, head_dim)).astype(np.float32))
    k, v = (
        math.round_bf16(rng.normal(0, spread, (tokens, kv_heads, head_dim)).astype(np.float32))
        for _ in range(2)
    )
    return q, k, v, np.arange(tokens - rows, tokens, dtype=np.int32)


def slow_exp(x):
    return float(math.exp(np.float32([x]))[0])


def slow_dot(pairs, acc):
    """A bf16 product: within a pair the odd element first."""
    pairs = [*pairs, (0.0, 0.0)] if len(pairs) % 2 else pairs
    for even, odd in zip(pairs[::2], pairs[1::2]):
        acc = rational.fma(*even, rational.fma(*odd, acc))
    return acc


def slow_attention(q, keys, values, position, window=None, scales=None):
    """One head of one row: docs/NUMERICS.md, read aloud. `scales` of K and V, where these are int8."""
    first = 0 if window is None else max(0, position - window + 1)
    total = None
    for split in range(0, position + 1, 256):
        state = None
        for block in range(split, min(split + 256, position + 1), 64):
            tokens = range(max(block, first), min(block + 64, position + 1))
            if not tokens:
                continue
            scores = [slow_dot(list(zip(q, keys[t])), 0.0) for t in tokens]
            if scales is not None:
                scores = [rational.multiply(s, scales[0][t]) for s, t in zip(scores, tokens)]
            peak = max(scores) if state is None else max(state[0], *scores)
            e = [0.0] * 64
            for t, score in zip(tokens, scores):
                e[t - block] = slow_exp(rational.add(score, -peak))
            weight = float(math.row_sum(np.float32([e]))[0])
            if scales is not None:
                for t in tokens:
                    e[t - block] = rational.multiply(e[t - block], scales[1][t])
            bf16 = math.round_bf16(np.float32(e))
            acc = [0.0] * len(q)
            if state is not None:
                decay = slow_exp(rational.add(state[0], -peak))
                weight = rational.fma(state[1], decay, weight)
                acc = [rational.multiply(x, decay) for x in state[2]]
            acc = [slow_dot(pairs_of(bf16, values, block, tokens, i), x) for i, x in enumerate(acc)]
            state = peak, weight, acc
        if state is None:
            continue
        if total is None:
            total = state
            continue
        peak = max(total[0], state[0])
        keep = slow_exp(rational.add(total[0], -peak))
        gain = slow_exp(rational.add(state[0], -peak))
        weight = rational.fma(state[1], gain, rational.multiply(total[1], keep))
        acc = [
            rational.fma(b, gain, rational.multiply(a, keep)) for a, b in zip(total[2], state[2])
        ]
        total = peak, weight, acc
    return [float(math.divide(np.float32(x), np.float32(total[1]))) for x in total[2]]


def pairs_of(weights, values, block, tokens, column):
    """Weights and values of a block's tokens, from an even one on."""
    start = block + (tokens.start - block) // 2 * 2
    return [
        (weights[t - block], values[t][column] if t in tokens else 0.0)
        for t in range(start, tokens.stop)
    ]


@pytest.mark.parametrize(
    ("tokens", "window"),
    [
        *((tokens, None) for tokens in (1, 2, 64, 65, 257, 600)),
        *((3, 1), (3, 2), (70, 5), (130, 64), (130, 67), (600, 260), (600, 300)),
    ],
)
def test_attention_equals_its_slow_twin(tokens, window):
    q, k, v, positions = attention_inputs(tokens, min(tokens, 3 if tokens < 100 else 1))
    actual = reference_exact.attend(q, k, v, positions, window)
    expected = [
        [slow_attention(head, k[:, 0], v[:, 0], int(position), window) for head in row]
        for row, position in zip(q, positions)
    ]
    assert rational.same(actual, expected)


@pytest.mark.parametrize(("tokens", "window"), [(1, None), (65, None), (300, None), (130, 67)])
def test_attention_over_int8_equals_its_slow_twin(tokens, window):
    q, k, v, positions = attention_inputs(tokens, min(tokens, 2))
    (k, key_scales), (v, value_scales) = map(math.quantise_groups, (k, v))
    actual = reference_exact.attend(q, k, v, positions, window, key_scales, value_scales)
    scales = key_scales[:, 0], value_scales[:, 0]
    expected = [
        [slow_attention(head, k[:, 0], v[:, 0], int(position), window, scales) for head in row]
        for row, position in zip(q, positions)
    ]
    assert rational.same(actual, expected)


def softmax_attention(q, k, v, positions, window):
    result = np.empty(q.shape)
    for row, position in enumerate(positions):
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            first = 0 if window is None else max(0, position - window + 1)
            keys, values = k[first : position + 1, shared], v[first : position + 1, shared]
            scores = keys.astype(np.float64) @ q[row, head].astype(np.float64)
            weights = np.exp(scores - scores.max())
            result[row, head] = weights @ values / weights.sum()
    return result


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("tokens", [1, 70, 300])
def test_attention_is_softmax(tokens, window):
    q, k, v, positions = attention_inputs(tokens, min(tokens, 40), 6, 3, 16, 1.0)
    expected = softmax_attention(q, k, v, positions, window)
    limit = np.abs(v).max() * 2.0**-8  # bf16 weights
    assert np.abs(reference_exact.attend(q, k, v, positions, window) - expected).max() <= limit
    assert np.allclose(reference_float.attend(q, k, v, positions, window), expected, atol=1e-5)


def test_attention_never_reads_what_is_masked():
    """Values of later tokens may be NaN; a zero in the answer is never negative."""
    q, k, v, positions = attention_inputs(80, 30)
    expected = reference_exact.attend(q[:10], k[:60], v[:60], positions[:10])
    k[60:], v[60:] = np.nan, np.nan
    assert np.array_equal(reference_exact.attend(q, k, v, positions)[:10], expected)
    ones = np.ones(k.shape[:2], np.float32)
    ones[60:] = np.nan
    assert np.array_equal(
        reference_exact.attend(q, k, v, positions, None, ones, ones)[:10], expected
    )
    v = np.full_like(v, -(2.0**-126))
    zero = reference_exact.attend(q, np.zeros_like(k), v * np.float32(0.25), positions)
    assert not zero.any()
    assert not np.signbit(zero).any()


def one_row_step(position=0, token=0):
    return tiny_llama.step([(np.array([token]), position, np.arange(4))])


def test_rope_keeps_angles_halves_and_the_rest():
    """A head is turned by its position in planes (i, i + pairs); dimensions past the rotary ones pass."""
    backend = ReferenceBackend(tiny_llama.kv_shape(4, 16), "f32")
    rope = RopeTable(np.array([1.0, 0.5], np.float32))
    backend.begin(one_row_step(position=3))
    qkv = np.random.default_rng(5).normal(size=(1, 64 + 64)).astype(np.float32)
    q = backend.rope_kv_write(qkv, rope, 0, 4, 2, 16).reshape(4, 16) * 4
    heads = qkv.reshape(8, 16)
    plane = (heads[:4, :2] + 1j * heads[:4, 2:4]) * np.exp(1j * np.array([3.0, 1.5]))
    assert np.allclose(q[:, :2], plane.real, atol=1e-6)
    assert np.allclose(q[:, 2:4], plane.imag, atol=1e-6)
    assert np.array_equal(q[:, 4:], heads[:4, 4:])
    assert np.array_equal(backend.pages[0, 0, 0, 3, :, 4:], heads[4:6, 4:])
    assert np.array_equal(backend.pages[0, 1, 0, 3], heads[6:])


def test_rope_in_exact_mode_rounds_to_bf16():
    plain, exact = (ReferenceBackend(tiny_llama.kv_shape(4, 16), mode) for mode in ("f32", "exact"))
    qkv = np.random.default_rng(6).normal(size=(1, 128)).astype(np.float32)
    queries = []
    for backend in (plain, exact):
        backend.begin(one_row_step(position=50))
        norm = np.linspace(1, 2, 16, dtype=np.float32)
        arguments = (qkv, tiny_llama.ROPE, 1, 4, 2, 16, norm, norm, 1e-6)
        queries.append(backend.rope_kv_write(*arguments))
    assert np.allclose(queries[0], queries[1], rtol=2.0**-8)
    assert np.array_equal(queries[1], math.round_bf16(queries[1]))
    keys = math.from_bf16(exact.pages[1, :, 3, 2])
    assert np.allclose(keys, plain.pages[1, :, 3, 2], rtol=2.0**-7)


def test_int8_pages_hold_each_head_with_a_scale_of_its_own():
    """K after rope and V, within half a step of 127 of the largest value of the head."""
    shape = tiny_llama.kv_shape(4, 16)
    plain = ReferenceBackend(shape, "f32")
    int8 = ReferenceBackend(replace(shape, dtype="int8"))
    qkv = np.random.default_rng(6).normal(size=(1, 128)).astype(np.float32)
    qkv[0, 100] = 50.0
    for backend in (plain, int8):
        backend.begin(one_row_step(position=50))
        backend.rope_kv_write(qkv, tiny_llama.ROPE, 1, 4, 2, 16)
    for part in (0, 1):
        expected, values = plain.pages[1, part, 3, 2], int8.pages[1, part, 3, 2]
        scales = int8.scales[1, part, 3, 2]
        assert np.allclose(scales, np.abs(expected).max(axis=1) / 127, rtol=1e-6)
        assert np.abs(values).max(axis=1).tolist() == [127, 127]
        assert (
            np.abs(values * scales[:, np.newaxis] - expected).max(axis=1) <= 0.51 * scales
        ).all()
    assert not int8.pages[0].any()
    assert not int8.scales[0].any()


def test_norm_linear_puts_outputs_and_biases_side_by_side():
    rng = np.random.default_rng(7)
    matrices = [rng.normal(size=(rows, 32)) for rows in (4, 2, 3)]
    biases = [rng.normal(size=len(matrix)).astype(np.float32) for matrix in matrices]
    x = rng.normal(size=(5, 32)).astype(np.float32)
    weight = np.linspace(0.5, 2, 32, dtype=np.float32)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    expected = normed @ np.concatenate(matrices).T + np.concatenate(biases)
    for mode in ("exact", "f32"):
        backend = ReferenceBackend(tiny_llama.kv_shape(1, 16), mode)
        handles = [backend.matrix(tiny_llama.raw(matrix)) for matrix in matrices]
        outputs = backend.norm_linear(x, weight, 1e-5, handles, biases)
        assert np.allclose(outputs, expected, atol=1e-5)


def test_embed_moves_bits():
    values = np.array([[1e-41, -0.0, 3.5, -1e-42]] * 3, np.float32)
    values[1, 0] = 7
    backend = ReferenceBackend(tiny_llama.kv_shape(4, 16))
    backend.begin(one_row_step(token=1))
    embedded = backend.embed(backend.matrix(tiny_llama.raw(values)))
    assert np.array_equal(embedded.view(np.uint32), values[1:2].view(np.uint32))


def test_logits_are_of_the_rows_asked_for():
    model = tiny_llama.TinyLlama()
    ids = np.arange(20)
    results = []
    for wanted in (np.arange(20), np.array([3, 19])):
        backend = ReferenceBackend(tiny_llama.kv_shape(4, 16))
        step = tiny_llama.step([(ids, 0, np.arange(4))])
        step.logit_rows = wanted.astype(np.int32)
        results.append(backend.run(step, model.build(backend)))
    assert np.array_equal(results[0][[3, 19]], results[1])


def test_exact_mode_follows_f32_mode():
    """Integer activations and bf16 move the logits a little, not a lot."""
    model = tiny_llama.TinyLlama(types=("F32",))
    ids = np.random.default_rng(8).integers(0, tiny_llama.VOCABULARY, 80)
    step = tiny_llama.step([(ids, 0, np.arange(5))])
    exact, plain = (
        backend.run(step, model.build(backend))
        for backend in (ReferenceBackend(tiny_llama.kv_shape(5, 16), m) for m in ("exact", "f32"))
    )
    assert np.abs(exact - plain).max() <= 0.03 * np.abs(plain).max()
