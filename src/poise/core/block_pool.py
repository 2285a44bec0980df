"""A fixed number of equal KV pages: who is referenced how often, and which free page goes next.

Does not know requests, tokens or what a page holds. Invariant: a page is in the free list exactly
when nothing references it. The free list is the LRU: a freed page keeps its content there until it
is taken again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

NULL_BLOCK_ID = -1
"""Stands in a block table for a page behind a sliding window: never read, never written."""


class BlockPool:
    """Pages 0 … num_blocks-1.

    free list:   next to be taken <- [ content of no use | oldest content ... newest content ]
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        return self._num_references[block_id] == 0

    def take(self) -> int:
        """The least recently used free page; its old content is the caller's to forget."""
        block_id, _ = self._free.popitem(last=False)
        self._num_references[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """One more reference to a page for its content; a free page leaves the free list."""
        if self._num_references[block_id] == 0:
            del self._free[block_id]
        self._num_references[block_id] += 1

    def release(self, block_id: int, keep_content: bool) -> None:
        """One reference less. A freed page is taken last if its content is kept, else next."""
        assert self._num_references[block_id] > 0, f"block {block_id} is released but not held"
        self._num_references[block_id] -= 1
        if self._num_references[block_id] == 0:
            self._free[block_id] = None
            if not keep_content:
                self._free.move_to_end(block_id, last=False)

    def check_invariants(self, held: Iterable[int]) -> None:
        """Recounts everything. `held`: all entries of all block tables but the null ones."""
        uses = Counter(held)
        assert self.num_blocks == len(self._num_references)
        for block_id, num_references in enumerate(self._num_references):
            assert num_references == uses.pop(block_id, 0), f"block {block_id}: wrong count"
            assert (num_references == 0) == (block_id in self._free), f"block {block_id}: free?"
        assert not uses, f"tables name pages that do not exist: {sorted(uses)}"
        assert len(self._free) + sum(n > 0 for n in self._num_references) == self.num_blocks
