"""All-vocabulary logits of a window's scored positions, a tile of rows at a time, from the kernels and from the reference.

Never holds more than one tile of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from poise.errors import ConfigError
from poise.executor.load import LoadedExecutor
from poise.executor.model_runner import ModelRunner
from poise.kernels.ops import LOGIT_TILE, KVShape, Step
from poise.kernels.reference import ReferenceBackend
from poise.models.families import family
from poise.models.weights import Source
from poise.weights.checkpoint import Checkpoint

F32 = NDArray[np.float32]
Int32s = NDArray[np.int32]


class Logits(Protocol):
    """A model that scores windows."""

    def tiles(self, window: Int32s, first_scored: int) -> Iterator[F32]:
        """Logits [rows, vocabulary] of the positions that predict tokens first_scored … len(window) − 1, in order.

        At most LOGIT_TILE rows at a time; each is valid until the next is asked for.
        """
        ...


class NativeLogits:
    """The executor that serves; the scored rows are run in chunks of a tile's height, which changes no bit of them."""

    def __init__(self, loaded: LoadedExecutor, num_tokens: int) -> None:
        assert isinstance(loaded.executor, ModelRunner)
        num_blocks = len(loaded.kv_groups) * -(-num_tokens // loaded.block_size)
        if loaded.num_blocks < num_blocks:
            raise ConfigError(
                f"{loaded.kv_cache.num_bytes} bytes of KV cache hold no window of {num_tokens} tokens; "
                f"{num_blocks * loaded.kv_cache.page_bytes} do"
            )
        self._runner = loaded.executor
        self._tile = np.empty((LOGIT_TILE, loaded.vocab_size), np.float32)
        self._block_table = np.arange(num_blocks, dtype=np.int32)[np.newaxis]

    def tiles(self, window: Int32s, first_scored: int) -> Iterator[F32]:
        self._run(window, 0, first_scored - 1, self._tile[:0])
        for rows in _tiles(first_scored - 1, len(window) - 1):
            logits = self._tile[: len(rows)]
            self._run(window, rows.start, rows.stop, logits)
            yield logits

    def _run(self, window: Int32s, start: int, end: int, logits: F32) -> None:
        step = _step(window, start, end, self._block_table)
        step.logit_rows = np.arange(len(logits), dtype=np.int32)
        self._runner.logits(step, logits)


class ReferenceLogits:
    """The plain model: float32 activations and KV on dequantised weights, which all stay in memory."""

    def __init__(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        config = checkpoint.config
        shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, num_tokens, 1)
        self._backend = _TiledReference(shape, "f32")
        self._source = Source(self._backend, checkpoint)
        self._config, self._record = config, family(config.architecture)

    def tiles(self, window: Int32s, first_scored: int) -> Iterator[F32]:
        step = _step(window, 0, len(window) - 1, np.zeros((1, 1), np.int32))
        self._backend.begin(step)
        self._record(self._backend, self._config, self._source)
        for rows in _tiles(first_scored - 1, len(window) - 1):
            yield self._backend.logits_of(np.array(rows, np.int32))


class _TiledReference(ReferenceBackend):
    """Runs all rows of a step at once, up to the logits, which come for the rows asked for."""

    def logits(self, *operands: Any) -> None:
        self._operands = operands

    def logits_of(self, rows: Int32s) -> F32:
        self.step.logit_rows = rows
        super().logits(*self._operands)
        assert self._logits is not None
        return self._logits


def _tiles(start: int, end: int) -> Iterator[range]:
    for first in range(start, end, LOGIT_TILE):
        yield range(first, min(first + LOGIT_TILE, end))


def _step(window: Int32s, start: int, end: int, block_table: Int32s) -> Step:
    """Tokens start … end − 1 of one sequence, no logits wanted yet."""
    return Step(
        token_ids=window[start:end],
        positions=np.arange(start, end, dtype=np.int32),
        query_start=np.array([0, end - start], np.int32),
        block_tables=block_table,
        logit_rows=np.empty(0, np.int32),
    )
