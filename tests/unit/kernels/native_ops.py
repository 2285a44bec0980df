"""Runs single operations natively, and what both sides of a comparison need: hostile rows, weights, pages.

A plan holds only the operation under test; its input is written into the plan's buffers, its output read from them.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from poise.kernels.cpu import available_isas, native
from poise.kernels.cpu.backend import CPUBackend
from poise.kernels.ops import KVShape, Step
from poise.weights.checkpoint import RawTensor
from tiny_models import SCALE_OFFSETS, encode_floats, random_blocks

ISAS = available_isas()
# Each instruction set, and each use of its instruction for pairs of bf16 that this CPU allows: "avx512, nowhere".
DOT_USES = [
    f"{isa}, {use}"
    for isa in ISAS
    for use in ("nowhere", "in products", "everywhere")
    if native.choose_dot_bf16(isa, use) == use
]
THREADS = (1, 2, 3)
INTEGER_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FLOAT_TYPES = ("BF16", "F16", "F32")
TYPES = INTEGER_TYPES + FLOAT_TYPES
# Every way in which a product is formed: container and what activations become before integer weights.
PRODUCTS = [(name, "int8") for name in TYPES] + [(name, "bf16") for name in INTEGER_TYPES]
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 70)
MAX_ROWS = max(ROW_COUNTS)
NO_KV = KVShape(1, 1, 16, 16, 1)
KV_DTYPES = ("bf16", "int8")
VALUE_TYPES = {"bf16": np.uint16, "int8": np.int8}
AWKWARD_SCALES = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF], np.uint16)


@cache
def pool(threads: int):
    return native.Pool(threads)


def backend(
    isa: str, threads: int, kv: KVShape = NO_KV, max_rows: int = MAX_ROWS, activations="int8"
) -> CPUBackend:
    """One of ISAS, or of DOT_USES; which use is in force, the latest backend says."""
    isa, _, use = isa.partition(", ")
    native.choose_dot_bf16(isa, use or "where faster")
    return CPUBackend(
        kv,
        max_rows=max_rows,
        threads=threads,
        activations=activations,
        variant=isa,
        pool=pool(threads),
    )


def rows_step(num_rows: int, token_ids=None, logit_rows=()) -> Step:
    """One sequence of `num_rows` rows from position 0, for operations that read no pages."""
    counting = np.arange(num_rows, dtype=np.int32)
    return Step(
        token_ids=np.zeros(num_rows, np.int32) if token_ids is None else token_ids,
        positions=counting,
        query_start=np.array([0, num_rows], np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        logit_rows=np.array(logit_rows, np.int32),
    )


def assert_same_bits(actual, expected, note="") -> None:
    """Equal in all bits; NaN equals NaN."""
    actual, expected = (np.ascontiguousarray(array) for array in (actual, expected))
    assert actual.shape == expected.shape, (note, actual.shape, expected.shape)
    equal = actual.view(np.uint32) == expected.view(np.uint32)
    equal |= np.isnan(actual) & np.isnan(expected)
    where = np.argwhere(~equal)
    assert not len(where), (
        f"{note}: {len(where)} of {equal.size} differ, first at {where[0].tolist()}: "
        f"{actual[tuple(where[0])]!r} instead of {expected[tuple(where[0])]!r}"
    )


def weights(type_name: str, rows: int, columns: int, seed: int) -> RawTensor:
    """A random matrix; a few blocks have scales that are zero, negative, f16 denormals or the largest."""
    random = np.random.default_rng(seed)
    if type_name in FLOAT_TYPES:
        values = random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
        values[random.random(values.shape) < 0.02] = 0
        values[random.random(values.shape) < 0.02] *= np.float32(1e-5)
        data = np.frombuffer(encode_floats(values, type_name), np.uint8).reshape(rows, -1)
        return RawTensor("weight", type_name, (rows, columns), data)
    data = random_blocks(type_name, (rows, columns), seed)
    blocks = data.reshape(-1, data[0].size // (columns // (256 if "K" in type_name else 32)))
    chosen = random.permutation(len(blocks))[: len(AWKWARD_SCALES)]
    for offset in SCALE_OFFSETS[type_name]:
        scales = AWKWARD_SCALES[: len(chosen)].view(np.uint8).reshape(-1, 2)
        blocks[chosen, offset : offset + 2] = scales
    return RawTensor("weight", type_name, (rows, columns), blocks.reshape(data.shape))


def vector(values) -> RawTensor:
    values = np.asarray(values, np.float32)
    return RawTensor("vector", "F32", values.shape, values.view(np.uint8).reshape(1, -1))


def hostile_rows(rows: int, columns: int, seed: int):
    """Random activations [rows, columns], every row with something awkward in its first 32 columns."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, columns)).astype(np.float32)
    x *= np.exp(random.normal(0, 4, (rows, 1))).astype(np.float32)
    ties = (np.arange(32) - 16 + 0.5).astype(np.float32)
    ties[0] = 127
    width = min(32, columns)
    heads = [
        x[0, :width].copy(),
        np.zeros(width),
        np.full(width, 1e-40),
        np.where(np.arange(width) == 5, 1e30, x[0, :width]),
        ties[:width],
        np.where(np.arange(width) == 3, np.nan, 1),
        np.where(np.arange(width) == width - 1, -np.inf, 1),
        np.full(width, -0.0),
        np.where(np.arange(width) == 7, 2.0**-100, 2.0**-101),
        np.full(width, 2.0**-100 * (1 - 2.0**-24)),
        np.where(np.arange(width) == 9, np.finfo(np.float32).max, -1e38),
        ties[:width] * np.float32(2.0**-90),
        np.where(np.arange(width) % 2 == 0, -0.0, 1e-39),
    ]
    for row in range(rows):
        x[row, :width] = heads[row % len(heads)]
    return x


def _regions(pages, kv: KVShape):
    """Views of native pages: values [blocks, layers, 2 (K, V), KV heads, bytes], scales [blocks, layers, 2, KV heads, block_size]."""
    layers = pages.view().reshape(kv.num_blocks, kv.num_layers, -1)
    width = VALUE_TYPES[kv.dtype]().nbytes
    end = 2 * kv.num_kv_heads * kv.block_size * kv.head_dim * width
    lead = (kv.num_blocks, kv.num_layers, 2, kv.num_kv_heads)
    scales = layers[..., end:].view(np.float32)
    return (
        layers[..., :end].view(VALUE_TYPES[kv.dtype]).reshape(*lead, -1),
        scales.reshape(*lead, -1) if kv.dtype == "int8" else scales,
    )


def _axes(kv: KVShape):
    """Shapes and orders of a head's K and V: as they lie in memory, and from there to [block_size, head_dim]."""
    block, dim = kv.block_size, kv.head_dim
    if kv.dtype == "int8":
        return ((block // 16, dim, 16), (0, 2, 1)), ((block, dim), (0, 1))
    return ((block // 16, dim // 2, 16, 2), (0, 2, 1, 3)), ((block // 2, dim, 2), (0, 2, 1))


def decode_pages(pages, kv: KVShape):
    """The native pages as the reference lays them out: values, and scales, of which bf16 has none."""
    values, scales = _regions(pages, kv)
    lead = (kv.num_blocks, kv.num_layers, kv.num_kv_heads)
    parts = []
    for part, (shape, order) in enumerate(_axes(kv)):
        stored = values[:, :, part].reshape(*lead, *shape)
        stored = stored.transpose(0, 1, 2, *(axis + 3 for axis in order))
        parts.append(stored.reshape(*lead, kv.block_size, kv.head_dim))
    if scales.size:
        scales = scales.transpose(1, 2, 0, 4, 3)
    return np.stack(parts).transpose(2, 0, 1, 4, 3, 5), scales


def encode_pages(content, scales, pages, kv: KVShape) -> None:
    """Writes pages given in the reference's layout into the native ones."""
    values, native_scales = _regions(pages, kv)
    lead = (kv.num_blocks, kv.num_layers, kv.num_kv_heads)
    for part, (shape, order) in enumerate(_axes(kv)):
        given = content[:, part].transpose(1, 0, 3, 2, 4)
        given = given.reshape(*lead, *(shape[axis] for axis in order))
        given = given.transpose(0, 1, 2, *(axis + 3 for axis in np.argsort(order)))
        values[:, :, part] = given.reshape(*lead, -1)
    if native_scales.size:
        native_scales[...] = scales.transpose(2, 0, 1, 4, 3)
