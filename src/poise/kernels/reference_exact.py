"""Numerics version 1 over whole arrays: products with each weight container, rope, attention.

Knows rows and weights, not steps or pages. Invariant: a row's result depends on that row's inputs and keys alone;
tiles below bound memory and change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from poise.config import Activations
from poise.kernels import reference_math as math
from poise.kernels.ops import KEY_BLOCK, SPLIT, Activation
from poise.kernels.reference_containers import FloatWeights, IntegerWeights
from poise.kernels.reference_math import F32, F64

TILE_TERMS = 1 << 17  # float64 terms held at once: they stay in the cache
TILE_ROWS = 32

State = tuple[
    F32, F32, F32
]  # maximum m and sum l [rows, heads], accumulator [rows, heads, head_dim]


class IntegerMatrix:
    """Levels less their zero point as float32 panels [groups, group, out], scales and minima float64 [groups, 1, out]."""

    def __init__(self, weights: IntegerWeights) -> None:
        rows = len(weights.levels)
        centred = weights.levels.astype(np.float32) - np.float32(weights.zero)
        panels = centred.reshape(rows, -1, weights.group).transpose(1, 2, 0)
        self.panels: F32 = np.ascontiguousarray(panels)
        self.scales = _per_group(weights.scales)
        self.minima = None if weights.minima is None else _per_group(weights.minima)

    @math.quiet
    def product(self, a: F32) -> F32:
        """a [rows, in] → [rows, out], through int8 activations."""
        groups, size, outputs = self.panels.shape
        q, d, sums = math.quantise(a)
        q = q.reshape(len(a), groups, size).transpose(1, 0, 2)
        offsets = _per_group(math.multiply(d, sums)).swapaxes(1, 2)  # d·S, [groups, rows, 1]
        d = np.repeat(d, math.GROUP // size, axis=1)
        activation_scales = _per_group(d).swapaxes(1, 2)
        result = np.empty((len(a), outputs), np.float32)
        for rows, columns in _tiles(len(a), outputs, 2 * groups):
            # Partial sums are integers below 2^24, so the order inside matmul does not matter.
            integers = q[:, rows] @ self.panels[:, :, columns] + np.float32(0)
            scales = math.narrow(self.scales[..., columns] * activation_scales[:, rows])
            terms = integers.astype(np.float64) * scales.astype(np.float64)
            if self.minima is not None:
                minima = self.minima[..., columns] * offsets[:, rows]
                terms = np.stack([terms, minima], axis=1).reshape(-1, *terms.shape[1:])
            result[rows, columns] = math.accumulate(terms, np.zeros(terms.shape[1:], np.float32))
        return result


class GroupedMatrix:
    """Integer weights that meet bf16 activations: levels less their zero point as float64 [group, groups, 1, out]."""

    def __init__(self, weights: IntegerWeights) -> None:
        rows = len(weights.levels)
        centred = weights.levels.astype(np.float64) - weights.zero
        levels = centred.reshape(rows, -1, weights.group).transpose(2, 1, 0)
        self.levels: F64 = np.ascontiguousarray(_swap_pairs(levels)[:, :, np.newaxis])
        self.scales = _per_group(weights.scales)
        self.minima = None if weights.minima is None else _per_group(weights.minima)

    @math.quiet
    def product(self, a: F32) -> F32:
        """a [rows, in] → [rows, out]: one bf16 product per group, then the groups ascending."""
        size, groups, _, outputs = self.levels.shape
        rounded = math.round_bf16(a)
        sums = _per_group(math.row_sum(rounded.reshape(len(a), -1, math.GROUP)))
        sums = sums.swapaxes(1, 2)  # [groups of 32, rows, 1]
        wide = math.widen(rounded).reshape(len(a), groups, size).transpose(2, 1, 0)
        wide = _swap_pairs(wide)[..., np.newaxis]
        result = np.empty((len(a), outputs), np.float32)
        for rows, columns in _tiles(len(a), outputs, groups * size):
            products = wide[:, :, rows] * self.levels[..., columns]
            partials = math.accumulate(products, np.zeros(products.shape[1:], np.float32))
            terms = partials.astype(np.float64) * self.scales[..., columns]
            if self.minima is not None:
                minima = self.minima[..., columns] * sums[:, rows]
                terms = np.stack([terms, minima], axis=1).reshape(-1, *terms.shape[1:])
            result[rows, columns] = math.accumulate(terms, np.zeros(terms.shape[1:], np.float32))
        return result


def _per_group(values: F32) -> F64:
    """[rows, groups] → [groups, 1, rows], as operands."""
    return np.ascontiguousarray(math.widen(values).T[:, np.newaxis])


class FloatMatrix:
    """Values [in, out] as float64 without denormals; bf16 rounds its activations and takes k in swapped pairs."""

    def __init__(self, weights: FloatWeights) -> None:
        self.paired = weights.type == "BF16"
        self.values: F64 = np.ascontiguousarray(math.widen(weights.values).T)

    @math.quiet
    def product(self, a: F32) -> F32:
        """a [rows, in] → [rows, out]."""
        width, outputs = self.values.shape
        wide = math.widen(math.round_bf16(a) if self.paired else a).T
        values = self.values
        if self.paired:
            wide, values = _swap_pairs(wide), _swap_pairs(values)
        result = np.empty((len(a), outputs), np.float32)
        for rows, columns in _tiles(len(a), outputs, width):
            terms = wide[:, rows, np.newaxis] * values[:, np.newaxis, columns]
            result[rows, columns] = math.accumulate(terms, np.zeros(terms.shape[1:], np.float32))
        return result


Matrix = IntegerMatrix | GroupedMatrix | FloatMatrix


def pack(weights: IntegerWeights | FloatWeights, activations: Activations = "int8") -> Matrix:
    if isinstance(weights, FloatWeights):
        return FloatMatrix(weights)
    return IntegerMatrix(weights) if activations == "int8" else GroupedMatrix(weights)


def _tiles(rows: int, columns: int, terms: int) -> Iterator[tuple[slice, slice]]:
    tile_rows = min(rows, TILE_ROWS)
    width = max(1, TILE_TERMS // (terms * max(1, tile_rows)))
    for row in range(0, rows, TILE_ROWS):
        for column in range(0, columns, width):
            yield slice(row, row + TILE_ROWS), slice(column, column + width)


def _swap_pairs(terms: F64) -> F64:
    """Axis 0 padded with zero to an even length, then 1, 0, 3, 2, …: the odd element of a pair comes first."""
    padding = [(0, len(terms) % 2)] + [(0, 0)] * (terms.ndim - 1)
    padded = np.pad(terms, padding)
    return padded.reshape(-1, 2, *terms.shape[1:])[:, ::-1].reshape(padded.shape)


def rotate(x: F32, cosine: F32, sine: F32) -> F32:
    """Rope: x [rows, heads, head_dim] by cosine and sine [rows, 1, pairs]; element i pairs with i + pairs."""
    pairs = cosine.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    return np.concatenate(
        [
            math.fma32(first, cosine, -math.multiply(second, sine)),
            math.fma32(second, cosine, math.multiply(first, sine)),
            x[..., 2 * pairs :],
        ],
        axis=-1,
    )


def gate(g: F32, u: F32, activation: Activation) -> F32:
    return math.multiply(math.silu(g) if activation == "silu" else math.gelu(g), u)


class Cached(NamedTuple):
    """K or V of tokens: values [tokens, heads, head_dim], exact in bf16; those of int8 have scales [tokens, heads]."""

    values: F32
    scales: F32 | None = None

    def of_query_heads(self, num_heads: int) -> Cached:
        """Whole blocks of tokens, each KV head as often as query heads share it."""
        padding = ((0, -len(self.values) % KEY_BLOCK), (0, 0), (0, 0))
        repeats = num_heads // self.values.shape[1]
        values = np.pad(self.values, padding).repeat(repeats, axis=1)
        if self.scales is None:
            return Cached(values)
        return Cached(values, np.pad(self.scales, padding[:2]).repeat(repeats, axis=1))

    def of_tokens(self, tokens: slice) -> Cached:
        return Cached(self.values[tokens], None if self.scales is None else self.scales[tokens])

    def scaled(self, x: F32) -> F32:
        """x [rows, heads, tokens] times the tokens' scales."""
        return x if self.scales is None else math.multiply(x, self.scales.T)


def attend(
    q: F32,
    keys: F32,
    values: F32,
    positions: NDArray[np.int32],
    window: int | None = None,
    key_scales: F32 | None = None,
    value_scales: F32 | None = None,
) -> F32:
    """Attention of one sequence's rows over its keys.

    q: [rows, heads, head_dim], scaled, bf16 values. keys, values: [tokens, KV heads, head_dim], bf16 values or int8 ones
    with scales [tokens, KV heads], tokens 0…max(positions). A row at position p sees tokens 0…p, with a window
    p - window + 1 … p.
    """
    first = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
    k = Cached(keys, key_scales).of_query_heads(q.shape[1])
    v = Cached(values, value_scales).of_query_heads(q.shape[1])
    result = np.empty_like(q)
    for begin in range(0, len(q), TILE_ROWS):
        tile = slice(begin, begin + TILE_ROWS)
        result[tile] = _attend_tile(q[tile], k, v, first[tile], positions[tile])
    return result


def _attend_tile(
    q: F32, keys: Cached, values: Cached, first: NDArray[np.int32], last: NDArray[np.int32]
) -> F32:
    """Rows that see positions first … last."""
    total = _empty_state(q)
    for start in range(int(first.min()) // SPLIT * SPLIT, int(last.max()) + 1, SPLIT):
        live = np.flatnonzero((last >= start) & (first < start + SPLIT))
        state = _split(q[live], keys, values, first[live], last[live], start)
        begun = first[live] < start
        _replace(total, live[~begun], _take(state, np.flatnonzero(~begun)))
        folded = _fold(_take(total, live[begun]), _take(state, np.flatnonzero(begun)))
        _replace(total, live[begun], folded)
    _, weight_sum, acc = total
    # + 0: whether a masked term was added, skipped or negative must not show in the sign of a zero.
    return math.add(math.divide(acc, weight_sum[..., np.newaxis]), np.float32(0))


def _empty_state(q: F32) -> State:
    rows, heads, head_dim = q.shape
    nothing = np.full((rows, heads), -np.inf, np.float32)
    return (
        nothing,
        np.zeros((rows, heads), np.float32),
        np.zeros((rows, heads, head_dim), np.float32),
    )


def _take(state: State, rows: NDArray[np.intp]) -> State:
    return state[0][rows], state[1][rows], state[2][rows]


def _replace(state: State, rows: NDArray[np.intp], new: State) -> None:
    for whole, part in zip(state, new, strict=True):
        whole[rows] = part


def _fold(left: State, right: State) -> State:
    peak = np.maximum(left[0], right[0])
    keep = math.exp(math.subtract(left[0], peak))
    gain = math.exp(math.subtract(right[0], peak))
    weight_sum = math.fma32(right[1], gain, math.multiply(left[1], keep))
    kept = math.multiply(left[2], keep[..., np.newaxis])
    return peak, weight_sum, math.fma32(right[2], gain[..., np.newaxis], kept)


def _split(
    q: F32,
    keys: Cached,
    values: Cached,
    first: NDArray[np.int32],
    last: NDArray[np.int32],
    start: int,
) -> State:
    """The softmax state of rows, all of which see some of the positions start … start + 255."""
    state = _empty_state(q)
    for block in range(start, min(start + SPLIT, int(last.max()) + 1), KEY_BLOCK):
        seen = (last >= block) & (first < block + KEY_BLOCK)
        begins = (first >= block) | (block == start)
        tokens = slice(block, block + KEY_BLOCK)
        positions = np.arange(block, block + KEY_BLOCK)
        for rows, update in ((seen & begins, _first_block), (seen & ~begins, _next_block)):
            live = np.flatnonzero(rows)
            if not len(live):
                continue
            visible = positions <= last[live, np.newaxis]
            visible &= positions >= first[live, np.newaxis]
            scores = _scores(q[live], keys.of_tokens(tokens))
            new = update(_take(state, live), scores, values.of_tokens(tokens), visible)
            _replace(state, live, new)
    return state


def _scores(q: F32, keys: Cached) -> F32:
    """[rows, heads, tokens]: bf16 product over head_dim, times the scale of K where it has one."""
    wide = _swap_pairs(math.widen(q).transpose(2, 0, 1))
    wide_keys = _swap_pairs(math.widen(keys.values).transpose(2, 1, 0))
    terms = wide[..., np.newaxis] * wide_keys[:, np.newaxis]
    return keys.scaled(math.accumulate(terms, np.zeros(terms.shape[1:], np.float32)))


def _first_block(state: State, scores: F32, values: Cached, visible: NDArray[np.bool_]) -> State:
    peak = _visible_peak(scores, visible)
    e = _weights(scores, peak, visible)
    return peak, math.row_sum(e), _add_values(state[2], e, values, visible)


def _next_block(state: State, scores: F32, values: Cached, visible: NDArray[np.bool_]) -> State:
    peak = np.maximum(state[0], _visible_peak(scores, visible))
    decay = math.exp(math.subtract(state[0], peak))
    e = _weights(scores, peak, visible)
    acc = math.multiply(state[2], decay[..., np.newaxis])
    weight_sum = math.fma32(state[1], decay, math.row_sum(e))
    return peak, weight_sum, _add_values(acc, e, values, visible)


def _visible_peak(scores: F32, visible: NDArray[np.bool_]) -> F32:
    masked = np.where(visible[:, np.newaxis], scores, np.float32(-np.inf))
    return np.asarray(masked.max(axis=-1), np.float32)


def _weights(scores: F32, peak: F32, visible: NDArray[np.bool_]) -> F32:
    e = math.exp(math.subtract(scores, peak[..., np.newaxis]))
    return np.where(visible[:, np.newaxis], e, np.float32(0))


@math.quiet
def _add_values(acc: F32, e: F32, values: Cached, visible: NDArray[np.bool_]) -> F32:
    """acc [rows, heads, head_dim] + bf16(e · scale) · values; a masked token adds +0 whatever it holds."""
    weights = math.widen(math.round_bf16(values.scaled(e))).transpose(2, 0, 1)[..., np.newaxis]
    terms = weights * math.widen(values.values)[:, np.newaxis]
    terms = np.where(visible.T[:, :, np.newaxis, np.newaxis], terms, 0.0)
    return math.accumulate(_swap_pairs(terms), acc)
