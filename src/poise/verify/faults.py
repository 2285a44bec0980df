"""Faults to inject, each a defect that serving engines are known for, and the check that must catch it.

Nothing here runs unless asked for: a fault patches a class or function while its context lasts. Those of the
arithmetic act in the numpy reference, which then stands in the native kernels' place under the same engine;
the others act in the engine itself, on the native kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from poise.core import block_hash
from poise.core.block_hash import SALT, TOKENS, Field
from poise.core.output import ModelRunnerOutput, SchedulerOutput
from poise.core.prefix_cache import PrefixCache
from poise.errors import ConfigError
from poise.executor import load
from poise.executor.model_runner import ModelRunner
from poise.kernels import reference, reference_exact, reference_math
from poise.kernels.cpu import available_isas, isa
from poise.kernels.cpu.backend import CPUBackend
from poise.kernels.ops import KEY_BLOCK, SPLIT, Step
from poise.kernels.reference_exact import IntegerMatrix
from poise.kernels.reference_math import F32, F64, GROUP
from poise.models.config import ModelConfig, RopeConfig
from poise.sampling.rows import Int32s, SamplingRows, SamplingState
from poise.verify.draft_faults import (
    accept_if_argmax_equal,
    drafted_kv_left_visible,
    penalties_without_drafts,
    residual_from_the_wrong_q,
)
from poise.verify.tape import TapeBackend
from poise.weights.dummy_checkpoint import DummyCheckpoint

FEW_ROWS = 4  # up to here the first fault sums in the right order


def tiny_checkpoint() -> DummyCheckpoint:
    """A random model small enough for numpy, with int8 weights and grouped heads."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=288,
        hidden_size=96,
        intermediate_size=192,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope=RopeConfig(theta=10_000.0, dim=16),
        tie_word_embeddings=False,
    )
    return DummyCheckpoint(Path("random-weights"), "tiny-random", config, "Q8_0")


@dataclass(frozen=True, slots=True)
class Fault:
    """`check` names the one that must catch it. `in_reference`: acts in numpy under the real engine."""

    name: str
    what: str
    check: str
    in_reference: bool
    patches: Callable[[], AbstractContextManager[object]]

    @contextmanager
    def injected(self) -> Iterator[None]:
        """While this lasts, whatever is loaded and run has the fault."""
        with self.patches():
            if self.in_reference:
                with patch.object(load, "CPUBackend", TapeBackend):
                    yield
            else:
                yield


def fault_named(name: str, faults: Sequence[Fault] | None = None) -> Fault:
    """One of `faults`, by default of those that `poise verify` finds. Raises ConfigError for an unknown name."""
    faults = FAULTS if faults is None else faults
    for fault in (*WITHOUT_FAULT, *faults):
        if fault.name == name:
            return fault
    known = ", ".join(fault.name for fault in faults)
    raise ConfigError(f"there is no fault {name!r}; known: {known}")


# --- arithmetic -----------------------------------------------------------------------------------


def _sum_order_by_row_count() -> AbstractContextManager[object]:
    """Kernels for many rows that add up from the other end."""
    original = IntegerMatrix.product

    def product(self: IntegerMatrix, a: F32) -> F32:
        if len(a) <= FEW_ROWS:
            return original(self, a)
        backwards = _with_groups(self, slice(None, None, -1))
        groups = a.reshape(len(a), -1, GROUP)[:, ::-1]
        return original(backwards, groups.reshape(a.shape))

    return patch.object(IntegerMatrix, "product", product)


def _with_groups(matrix: IntegerMatrix, chosen: slice) -> IntegerMatrix:
    """The matrix with some of its groups, in that order."""
    part = copy.copy(matrix)
    part.panels, part.scales = matrix.panels[chosen], matrix.scales[chosen]
    part.minima = None if matrix.minima is None else matrix.minima[chosen]
    return part


def _batch_wide_activation_scale() -> AbstractContextManager[object]:
    """Activations quantised with the largest scale among all rows of the step."""
    original = reference_math.quantise

    def quantise(x: F32) -> tuple[F32, F32, F32]:
        q, d, sums = original(x)
        if not len(x):
            return q, d, sums
        shared = np.broadcast_to(d.max(axis=0), d.shape)
        with np.errstate(all="ignore"):
            q = np.nan_to_num(np.rint(q * (d / shared)[..., np.newaxis])).astype(np.float32)
        return q, shared, q.sum(axis=-1)

    return patch.object(reference_math, "quantise", quantise)


def _split_bound_to_the_chunk() -> AbstractContextManager[object]:
    """Attention splits that end where the chunk of the prompt begins."""
    original = reference_exact.attend

    def attend(q: F32, keys: F32, values: F32, positions: Int32s, *rest: Any) -> F32:
        first = int(positions[0]) // KEY_BLOCK * KEY_BLOCK
        with patch.object(reference_exact, "SPLIT", min(first, SPLIT) or SPLIT):
            return original(q, keys, values, positions, *rest)

    return patch.object(reference._Exact, "attend", staticmethod(attend))


@contextmanager
def _thread_split_reduction() -> Iterator[None]:
    """Each thread sums its part of a row; the parts are added."""
    original, run = IntegerMatrix.product, TapeBackend.run
    threads = 1

    def run_with_threads(self: TapeBackend, *arguments: Any, **options: Any) -> None:
        nonlocal threads
        threads = self.threads
        run(self, *arguments, **options)

    def product(self: IntegerMatrix, a: F32) -> F32:
        edges = np.linspace(0, len(self.panels), threads + 1).astype(int)
        total: F32 | None = None
        for begin, end in pairwise(edges):
            if begin < end:
                columns = slice(begin * GROUP, end * GROUP)
                part = original(_with_groups(self, slice(begin, end)), a[:, columns])
                total = part if total is None else reference_math.add(total, part)
        assert total is not None, "a matrix has at least one group"
        return total

    with (
        patch.object(IntegerMatrix, "product", product),
        patch.object(TapeBackend, "run", run_with_threads),
    ):
        yield


def _unfused_multiply_add() -> AbstractContextManager[object]:
    """One instruction set rounds the product before it adds."""
    original = reference_math.accumulate

    def accumulate(products: F64, start: F32) -> F32:
        if isa() == available_isas()[-1]:
            return original(products, start)
        acc = reference_math.flush_denormals(start)
        for product in products:
            acc = reference_math.narrow(
                reference_math.narrow(product).astype(np.float64) + acc.astype(np.float64)
            )
        return acc

    return patch.object(reference_math, "accumulate", reference_math.quiet(accumulate))


def _unmasked_recycled_page() -> AbstractContextManager[object]:
    """What a page holds behind a sequence's end has weight in the last row's attention."""
    original = reference.ReferenceBackend.attention

    def attention(self: reference.ReferenceBackend, q: F32, layer: int, *rest: Any) -> F32:
        result = original(self, q, layer, *rest)
        step, size = self.step, self._kv.block_size
        group, place = self._kv.place(layer)
        for table, end in zip(self._tables(group), step.query_start[1:]):
            block, offset = divmod(int(step.positions[end - 1]) + 1, size)
            if offset:
                values = self.values_at(place, table[block], offset)
                heads = result[end - 1].reshape(len(values), -1, values.shape[-1])
                heads += np.float32(2**-6) * values[:, np.newaxis]
        return result

    return patch.object(reference.ReferenceBackend, "attention", attention)


# --- state ----------------------------------------------------------------------------------------


def _shared_random_stream() -> AbstractContextManager[object]:
    """All rows of a step draw from one stream, in the order in which they stand."""
    original = SamplingState.fill

    def fill(self: SamplingState, rows: SamplingRows, index: int, *rest: Any) -> None:
        original(self, rows, index, *rest)
        rows.records["choice"][index] = index

    return patch.object(SamplingState, "fill", fill)


def _stale_block_after_preemption() -> AbstractContextManager[object]:
    """A request that comes back goes on with the first block that it had before."""
    original = ModelRunner.execute
    first_blocks: dict[int, Sequence[tuple[int, ...]]] = {}

    def execute(self: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
        new_requests = []
        for new in output.new_requests:
            resumed = len(new.token_ids) > new.num_prompt_tokens
            if resumed and new.request_id in first_blocks:
                stale = zip(first_blocks[new.request_id], new.block_tables)
                new = replace(new, block_tables=tuple((*old, *table[1:]) for old, table in stale))
            else:
                first_blocks[new.request_id] = tuple(table[:1] for table in new.block_tables)
            new_requests.append(new)
        return original(self, replace(output, new_requests=tuple(new_requests)))

    return patch.object(ModelRunner, "execute", execute)


def _wrong_prefix_block() -> AbstractContextManager[object]:
    """The prefix cache finds a block of the right shape that holds something else."""
    original = PrefixCache.find

    def find(
        self: PrefixCache,
        group: int,
        block_hash: bytes,
        token_ids: Sequence[int],
        salt: bytes | None = None,
    ) -> int | None:
        found = original(self, group, block_hash, token_ids, salt)
        others = [block for block in self._block_by_hash[group].values() if block != found]
        return found if found is None or not others else others[0]

    return patch.object(PrefixCache, "find", find)


def _hash_without_parent() -> AbstractContextManager[object]:
    """A block's hash that leaves out what came before the block."""

    def without_parent(parent: bytes, tokens: bytes, salt: bytes | None) -> tuple[Field, ...]:
        return ((TOKENS, tokens), (SALT, salt or b""))

    return patch.object(block_hash, "block_fields", without_parent)


def _prefix_known_by_its_first_block() -> AbstractContextManager[object]:
    """A pass over a shared split for all whose split begins with the same block."""
    original = CPUBackend.run

    def run(self: CPUBackend, step: Step, *arguments: Any, **options: Any) -> None:
        tables = step.block_tables.reshape(len(step.block_tables), self._kv.num_groups, -1).copy()
        count = SPLIT // self._kv.block_size
        found: dict[tuple[int, int, int], Int32s] = {}
        for table, row in zip(tables, step.query_start):
            for split in range((int(step.positions[row]) + 1) // SPLIT):
                for group, blocks in enumerate(table[:, split * count : (split + 1) * count]):
                    blocks[:] = found.setdefault((group, split, int(blocks[0])), blocks)
        step = replace(step, block_tables=tables.reshape(step.block_tables.shape))
        original(self, step, *arguments, **options)

    return patch.object(CPUBackend, "run", run)


FAULTS: tuple[Fault, ...] = (
    Fault("sum-order-by-row-count", "products of more than 4 rows are summed from the other end",
          "company", True, _sum_order_by_row_count),
    Fault("batch-wide-activation-scale", "all rows of a step share the scale of their int8 activations",
          "company", True, _batch_wide_activation_scale),
    Fault("split-bound-to-chunk", "attention's splits end where a chunk of the prompt begins",
          "chunks", True, _split_bound_to_the_chunk),
    Fault("thread-split-reduction", "threads sum parts of a row, the parts are added",
          "threads", True, _thread_split_reduction),
    Fault("unfused-multiply-add", "one instruction set rounds between multiplying and adding",
          "isa", True, _unfused_multiply_add),
    Fault("unmasked-recycled-page", "attention sees a page's old content behind the last token",
          "recycled", True, _unmasked_recycled_page),
    Fault("shared-random-stream", "draws come from one stream in the order of the step's rows",
          "order", False, _shared_random_stream),
    Fault("stale-block-after-preemption", "a request that comes back keeps the block it had lost",
          "preemption", False, _stale_block_after_preemption),
    Fault("wrong-prefix-block", "the prefix cache hands out another block of the right shape",
          "cache", False, _wrong_prefix_block),
    Fault("hash-without-parent", "a block's hash leaves out the blocks before it",
          "cache", False, _hash_without_parent),
    Fault("prefix-known-by-first-block", "one pass serves all whose split begins with the same block",
          "shared", False, _prefix_known_by_its_first_block),
    Fault("drafted-kv-left-visible", "the KV of a rejected draft stays where the drawn token's belongs",
          "speculation", True, drafted_kv_left_visible),
    Fault("accept-if-argmax-equal", "a sampled request accepts a draft because it is the likeliest token",
          "speculation", False, accept_if_argmax_equal),
    Fault("penalties-without-drafts", "penalties behind drafts count no token of the draft",
          "speculation", False, penalties_without_drafts),
    Fault("residual-from-the-wrong-q", "what replaces a rejected draft is drawn from p less a q that it was not drawn from",
          "rejection", False, residual_from_the_wrong_q),
)  # fmt: skip

WITHOUT_FAULT: tuple[Fault, ...] = (
    Fault("none: native kernels", "nothing", "", False, nullcontext),
    Fault("none: numpy reference", "nothing", "", True, nullcontext),
)
"""What faults are held against: nothing injected, in either arithmetic."""
