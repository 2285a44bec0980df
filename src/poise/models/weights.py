"""Gives a model its weights by canonical name, each packed once and kept.

The numpy reference asks at every step, the CPU backend once, while it records; both go through here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from poise.kernels.ops import Handle, Ops
from poise.weights.checkpoint import Checkpoint


class Source:
    """Handles of a checkpoint's tensors on one backend."""

    def __init__(self, ops: Ops, checkpoint: Checkpoint, prefix: str = "") -> None:
        self._ops = ops
        self._checkpoint = checkpoint
        self._prefix = prefix
        self._handles: dict[str, Any] = {}

    def layer(self, index: int) -> Source:
        """The weights of one layer, under their short names."""
        made: Source = self.once(
            f"layers.{index}", lambda: Source(self._ops, self._checkpoint, f"layers.{index}.")
        )
        return made

    def matrix(self, name: str) -> Handle:
        return self.once(name, lambda: self._packed(self._prefix + name))

    def vector(self, name: str) -> Handle:
        return self.once(
            name, lambda: self._ops.vector(self._checkpoint.tensor(self._prefix + name))
        )

    def _packed(self, name: str) -> Handle:
        """A matrix in its container; the file's pages that it was read from are given back at once."""
        packed = self._ops.matrix(self._checkpoint.tensor(name))
        self._checkpoint.release()
        return packed

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returned the first time it was asked for under this name."""
        if name not in self._handles:
            self._handles[name] = make()
        return self._handles[name]
