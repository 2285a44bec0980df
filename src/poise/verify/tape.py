"""The numpy reference behind the CPU backend's face, for faults that must act inside the arithmetic.

Records a model's operations and replays them on `kernels/reference.py::ReferenceBackend`; samples with the
native sampler. Invariant: without a fault its results are those of the native kernels, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.kernels.cpu import isa, native
from poise.kernels.cpu.recorded import RecordedOperation
from poise.kernels.ops import KVShape, Ops, Step
from poise.kernels.reference import ReferenceBackend
from poise.weights.checkpoint import RawTensor


@dataclass(frozen=True, slots=True)
class _Value:
    """Stands for what operation `index` returns."""

    index: int


class _Pages:
    """The reference's pages, to be filled like native ones."""

    def __init__(self, reference: ReferenceBackend) -> None:
        self._reference = reference

    def fill(self, block: int, byte: int) -> None:
        self._reference.fill(block, byte)

    def populate(self, first: int, count: int) -> None:
        """They are in memory from the start."""


class TapeBackend:
    """`Ops` and `run`, as `kernels/cpu/backend.py::CPUBackend` has them."""

    share_prefixes = False  # it has no such pass
    spared_keys: Sequence[int] = ()

    def __init__(
        self, kv: KVShape, *, max_rows: int, threads: int, share_prefixes: bool, **options: Any
    ) -> None:
        self.variant = isa()
        self.threads = threads
        self.arena = SimpleNamespace(used_bytes=0)
        self.operations: list[RecordedOperation] = []  # none whose work would be worth counting
        self._reference = ReferenceBackend(kv, **options)
        self.pages = _Pages(self._reference)
        self._tape: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def matrix(self, tensor: RawTensor) -> object:
        return self._reference.matrix(tensor)

    def vector(self, tensor: RawTensor) -> object:
        return self._reference.vector(tensor)

    def __getattr__(self, name: str) -> Callable[..., object]:
        if not hasattr(Ops, name):
            raise AttributeError(name)

        def record(*arguments: Any, **options: Any) -> object:
            self._tape.append((name, arguments, options))
            return _Value(len(self._tape) - 1)

        return record

    def run(self, step: Step, sampling: NDArray[np.uint8], results: NDArray[np.uint8]) -> None:
        """One step; as `CPUBackend.run` without `logits`."""
        wanted = len(step.logit_rows)
        if not wanted:  # the reference has no products of no rows
            step = replace(step, logit_rows=np.zeros(1, np.int32))
        logits = self._reference.run(step, self._replay)
        if wanted:
            drawn = native.sample_rows(np.ascontiguousarray(logits), sampling, self.variant)
            results[:] = np.frombuffer(drawn, np.uint8)

    def _replay(self, ops: Ops) -> None:
        values: list[object] = []

        def given(argument: object) -> object:
            return values[argument.index] if isinstance(argument, _Value) else argument

        for name, arguments, options in self._tape:
            operation = getattr(ops, name)
            values.append(
                operation(
                    *map(given, arguments), **{key: given(value) for key, value in options.items()}
                )
            )
