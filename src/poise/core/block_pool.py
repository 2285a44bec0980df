"""A fixed number of equal KV pages: who is referenced how often, and which free page goes next.

Does not know requests, tokens or what a page holds. Invariant: each page is in exactly one of three
places: referenced, blank (free, of no use), or in the order of eviction (free, its content of use until
it is taken).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from poise.core.eviction import PUBLIC, EvictionOrder
from poise.core.tenant import DEFAULT_TENANT_NAME

NULL_BLOCK_ID = -1
"""Stands in a block table for a page behind a sliding window: never read, never written."""


class BlockPool:
    """Pages 0 … num_blocks-1.

    free pages, next to be taken first:   [ blank ] [ in the order of eviction ]
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"a pool of {num_blocks} blocks"
        self.num_blocks = num_blocks
        self.order = EvictionOrder(num_blocks)
        self._num_references = [0] * num_blocks
        self._blank = deque(range(num_blocks))
        self.num_touched = 0  # pages from here on were never taken

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self.order)

    @property
    def num_blank(self) -> int:
        """Free pages whose content is of no use."""
        return len(self._blank)

    def is_free(self, block_id: int) -> bool:
        return self._num_references[block_id] == 0

    def is_shared(self, block_id: int) -> bool:
        """Whether several requests refer to it."""
        return self._num_references[block_id] > 1

    def take(self, tenant: str = DEFAULT_TENANT_NAME) -> int:
        """A free page for a tenant, whose it is from now on; its old content is the caller's to forget."""
        if self._blank:
            block_id = self._blank.popleft()
            if block_id >= self.num_touched:
                self.num_touched = block_id + 1
        else:
            block_id = self.order.victim(tenant)
            self.order.remove(block_id)
        self.order.charge(block_id, tenant)
        self._num_references[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """One more reference to a page for its content; a free page leaves the order of eviction."""
        if self._num_references[block_id] == 0:
            self.order.remove(block_id)
        self._num_references[block_id] += 1

    def release(self, block_id: int, keep_content: bool) -> None:
        """One reference less. A freed page is taken last if its content is kept, else next."""
        assert self._num_references[block_id] > 0, f"block {block_id} is released but not held"
        self._num_references[block_id] -= 1
        if self._num_references[block_id] == 0:
            if keep_content:
                self.order.add(block_id)
            else:
                self._make_blank(block_id)

    def drop_content(self, block_id: int) -> None:
        """Nothing can find the page's content any more: if it is free, it is blank."""
        if block_id in self.order:
            self.order.remove(block_id)
            self._make_blank(block_id)

    def make_public(self, block_id: int) -> None:
        """A referenced page turned out to hold a block of a public prefix."""
        assert self._num_references[block_id] > 0, f"block {block_id} is made public but not held"
        self.order.charge(block_id, PUBLIC)

    def _make_blank(self, block_id: int) -> None:
        self.order.credit(block_id)
        self._blank.appendleft(block_id)

    def check_invariants(
        self, held: Iterable[int], is_leaf: Callable[[int], bool] = lambda block_id: True
    ) -> None:
        """Recounts everything. `held`: all entries of all block tables but the null ones; `is_leaf`
        says of a page with content whether no cached block continues it.
        """
        uses = Counter(held)
        blank = set(self._blank)
        assert self.num_blocks == len(self._num_references)
        assert len(blank) == len(self._blank), "a page is blank twice"
        for block_id, num_references in enumerate(self._num_references):
            assert num_references == uses.pop(block_id, 0), f"block {block_id}: wrong count"
            places = (num_references > 0, block_id in blank, block_id in self.order)
            assert sum(places) == 1, f"block {block_id}: referenced, blank or kept?"
            assert self.order.is_charged(block_id) != (block_id in blank), (
                f"block {block_id}: whose?"
            )
        assert blank.issuperset(range(self.num_touched, self.num_blocks)), "never taken, yet used"
        assert not uses, f"tables name pages that do not exist: {sorted(uses)}"
        self.order.check_invariants(is_leaf)
