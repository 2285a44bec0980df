"""Which page holds the KV of which token prefix, and who is about to compute one.

Knows blocks by hash and by token ids; does not know references, requests' progress or steps.
Invariant: at most one page per (KV group, hash), and at most one (KV group, hash) per page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from poise.core.block_hash import BlockHasher


class _Entry(NamedTuple):
    """What a registered page holds."""

    group: int
    block_hash: bytes
    token_ids: tuple[int, ...]
    salt: bytes | None  # for whom it was computed; None: part of a public prefix
    parent: bytes | None


class PrefixCache:
    """Full blocks by identity (`core/block_hash.py` says what a hash names); a hit compares token ids
    and salt as well, so that not even two blocks of one hash are mistaken for each other. A block is a leaf while no cached one names it as its parent.
    """

    def __init__(self, *, key: bytes, identity: bytes, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        self._hasher = BlockHasher(key=key, identity=identity, block_size=block_size)
        self._block_by_hash: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._entry_by_block: dict[int, _Entry] = {}
        self._num_children: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._on_leaf: Callable[[int, bool], None] = lambda block_id, is_leaf: None

    def watch_leaves(self, on_leaf: Callable[[int, bool], None]) -> None:
        """From now on `on_leaf` hears of each page that becomes a leaf or ceases to be one."""
        self._on_leaf = on_leaf

    def extend_hashes(
        self, hashes: list[bytes], token_ids: Sequence[int], salt: bytes, num_public_tokens: int = 0
    ) -> None:
        """Appends to `hashes` those of the full blocks of `token_ids` that it lacks."""
        self._hasher.extend(hashes, token_ids, salt, num_public_tokens)

    def find(
        self,
        group: int,
        block_hash: bytes,
        token_ids: Sequence[int],
        salt: bytes | None = None,
    ) -> int | None:
        """The page that holds this block, or None. `salt` is None inside a public prefix."""
        block_id = self._block_by_hash[group].get(block_hash)
        if block_id is None:
            return None
        entry = self._entry_by_block[block_id]
        if entry.token_ids != tuple(token_ids) or entry.salt != salt:
            return None
        return block_id

    def register(
        self,
        group: int,
        block_id: int,
        block_hash: bytes,
        token_ids: Sequence[int],
        salt: bytes | None = None,
        parent: bytes | None = None,
    ) -> bool:
        """Makes a page findable; False if another one already stands for this block.

        `parent` is the hash of the block without which this one can't be found, if there is one.
        """
        if block_hash in self._block_by_hash[group]:
            return False
        assert block_id not in self._entry_by_block, f"block {block_id} is registered twice"
        self._block_by_hash[group][block_hash] = block_id
        self._entry_by_block[block_id] = _Entry(group, block_hash, tuple(token_ids), salt, parent)
        self._on_leaf(block_id, self.is_leaf(block_id))
        if parent is not None:
            self._add_child(group, parent, 1)
        return True

    def _add_child(self, group: int, parent: bytes, change: int) -> None:
        counts = self._num_children[group]
        before = counts.get(parent, 0)
        counts[parent] = before + change
        if before + change == 0:
            del counts[parent]
        parent_id = self._block_by_hash[group].get(parent)
        if parent_id is not None and 0 in (before, before + change):
            self._on_leaf(parent_id, before + change == 0)

    def is_leaf(self, block_id: int) -> bool:
        """Whether no cached block continues what this page holds."""
        entry = self._entry_by_block[block_id]
        return entry.block_hash not in self._num_children[entry.group]

    def holds(self, block_id: int) -> bool:
        return block_id in self._entry_by_block

    def forget(self, block_id: int) -> None:
        """The page's content can no longer be found, if it ever could."""
        entry = self._entry_by_block.pop(block_id, None)
        if entry is not None:
            del self._block_by_hash[entry.group][entry.block_hash]
            self._on_leaf(block_id, True)
            if entry.parent is not None:
                self._add_child(entry.group, entry.parent, -1)

    def blocks(self) -> list[int]:
        """All pages that can be found."""
        return list(self._entry_by_block)

    def check_invariants(self) -> None:
        """Both maps must be each other's inverse, children be counted right."""
        found = {
            block_id: (group, block_hash)
            for group, blocks in enumerate(self._block_by_hash)
            for block_hash, block_id in blocks.items()
        }
        assert sum(map(len, self._block_by_hash)) == len(found), "a page stands for two blocks"
        kept = {block_id: entry[:2] for block_id, entry in self._entry_by_block.items()}
        assert found == kept, "hash map and page map differ"
        children = [Counter[bytes]() for _ in self._block_by_hash]
        for entry in self._entry_by_block.values():
            if entry.parent is not None:
                children[entry.group][entry.parent] += 1
        assert children == self._num_children, "children are counted wrong"
        assert all(len(e.token_ids) == self.block_size for e in self._entry_by_block.values())


class PrefillClaims:
    """For each full block that an admitted request has yet to compute: which request will.

    Another one that comes to such a block waits for the page instead of computing it again. Waiting
    can't go in circles: who waits at block i shares all blocks before it with the owner, and the
    owner, not past i itself, either computes i next or waits at an earlier block.
    """

    def __init__(self) -> None:
        self._owner_by_hash: dict[bytes, int] = {}

    def first_claimed_by_other(self, hashes: Sequence[bytes], request_id: int) -> int | None:
        """Index of the first of `hashes` that another request will compute."""
        for i, block_hash in enumerate(hashes):
            if self._owner_by_hash.get(block_hash, request_id) != request_id:
                return i
        return None

    def claim(self, hashes: Sequence[bytes], request_id: int) -> None:
        """Takes those that nobody has claimed."""
        for block_hash in hashes:
            self._owner_by_hash.setdefault(block_hash, request_id)

    def release(self, hashes: Sequence[bytes], request_id: int) -> None:
        """Gives up those that this request owns."""
        for block_hash in hashes:
            if self._owner_by_hash.get(block_hash) == request_id:
                del self._owner_by_hash[block_hash]

    def owners(self) -> set[int]:
        """Requests that own a claim (for checks)."""
        return set(self._owner_by_hash.values())
