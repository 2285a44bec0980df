"""Pages for requests: block tables per KV group, prefix hits, what a step adds to the cache.

Knows requests and pages; does not know budgets, order or policies. Invariant: shared pages are full
and are never written, so nothing is ever copied; a page computed by the step in flight is findable
from the moment it is scheduled, stays so if the step returns, and is forgotten if it fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poise.core.block_pool import NULL_BLOCK_ID, BlockPool
from poise.core.output import KVGroupSpec
from poise.core.prefix_cache import PrefillClaims, PrefixCache
from poise.core.request import Request
from poise.core.tenant import TenantTable

BlockIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached pages for positions start … end-1, whole blocks: per group, one id for each."""

    start: int
    end: int
    blocks: BlockIds


class KVCacheManager:
    """One pool for all KV groups. Without `prefix_cache` nothing is shared."""

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        num_blocks: int,
        block_size: int,
        prefix_cache: PrefixCache | None,
    ) -> None:
        assert groups, "a model has at least one KV group"
        assert prefix_cache is None or prefix_cache.block_size == block_size
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._windows = tuple(group.sliding_window for group in groups)
        self._slides = any(window is not None for window in self._windows)
        self.no_blocks: BlockIds = ((),) * len(groups)
        self._cache = prefix_cache
        if prefix_cache is not None:
            prefix_cache.watch_leaves(self.pool.order.set_leaf)
        self._claims = PrefillClaims()
        self._pending: dict[
            int, list[int]
        ] = {}  # pages that the step in flight computes, by request

    @property
    def num_pool_tokens(self) -> int:
        """Tokens that fit the pool if every group keeps all of them."""
        return self.pool.num_blocks // len(self._windows) * self.block_size

    def set_tenants(self, tenants: TenantTable) -> None:
        """Whose cached pages others can't flush, from now on."""
        self.pool.order.set_shares(tenants.protected_share)

    # --- how much fits ----------------------------------------------------------------------------

    def num_blocks_needed(self, num_tokens: int, max_chunk: int) -> int:
        """The most pages that `num_tokens` take at once, computed in chunks up to `max_chunk`."""
        return sum(self._group_need(window, num_tokens, max_chunk) for window in self._windows)

    def num_new_blocks(self, request: Request, end: int) -> int:
        """Pages that its tables lack to hold positions 0 … end-1, hits among them."""
        num_held = len(request.block_tables[0]) if request.block_tables else 0
        return (-(-end // self.block_size) - num_held) * len(self._windows)

    def _group_need(self, window: int | None, num_tokens: int, max_chunk: int) -> int:
        num_blocks = -(-num_tokens // self.block_size)
        if window is None:
            return num_blocks
        return min(num_blocks, (window + max_chunk) // self.block_size + 2)

    def fits_now(
        self, request: Request, hit: PrefixHit | None, max_chunk: int, num_spare: int = 0
    ) -> bool:
        """Whether free pages do for all known tokens and `num_spare` stay free; those of the hit in use cost nothing."""
        need = self.num_blocks_needed(request.num_tokens, max_chunk)
        if hit is not None:
            need -= sum(b != NULL_BLOCK_ID and not self.pool.is_free(b) for b in _flat(hit.blocks))
        return need + num_spare <= self.pool.num_free

    # --- prefix hits ------------------------------------------------------------------------------

    def lookup(self, request: Request) -> PrefixHit | None:
        """The longest hit that every group can serve from where the request stands, or None.

        At least the last known token is left to compute, and only a request at a block's edge can
        take a hit. Nothing changes but the request's list of hashes.
        """
        size = self.block_size
        first, partial = divmod(request.num_computed_tokens, size)
        if self._cache is None:
            return None
        self._extend_hashes(request)
        if partial or request.needs_prompt_logprobs:
            return None
        last = (request.num_tokens - 1) // size
        found: list[list[int]] = []
        for group, window in enumerate(self._windows):
            blocks: list[int] = []
            for i in range(first, last):
                tokens = request.token_ids[i * size : (i + 1) * size]
                block_id = self._cache.find(
                    group, request.block_hashes[i], tokens, self._salt(request, i)
                )
                if block_id is None and window is None:
                    last = i
                    break
                blocks.append(NULL_BLOCK_ID if block_id is None else block_id)
            found.append(blocks)
        while (gap := self._last_gap(found, first, last)) is not None:
            last = gap
        if last <= first:
            return None
        return PrefixHit(
            first * size,
            last * size,
            tuple(
                tuple(
                    block_id
                    if first + i >= self._first_visible(window, last * size)
                    else NULL_BLOCK_ID
                    for i, block_id in enumerate(blocks[: last - first])
                )
                for window, blocks in zip(self._windows, found)
            ),
        )

    def _extend_hashes(self, request: Request) -> None:
        assert self._cache is not None, "without a cache nothing is hashed"
        owner = request.owner
        self._cache.extend_hashes(
            request.block_hashes, request.token_ids, owner.cache_salt, owner.num_public_tokens
        )

    def _salt(self, request: Request, i: int) -> bytes | None:
        """For whom block `i` is; None: for everybody, it lies wholly inside a public prefix."""
        owner = request.owner
        return None if (i + 1) * self.block_size <= owner.num_public_tokens else owner.cache_salt

    def _last_gap(self, found: list[list[int]], first: int, last: int) -> int | None:
        """The last block before `last` that some group must see from there and lacks."""
        for window, blocks in zip(self._windows, found):
            visible = self._first_visible(window, last * self.block_size)
            for i in range(last - 1, max(first, visible) - 1, -1):
                if blocks[i - first] == NULL_BLOCK_ID:
                    return i
        return None

    def _first_visible(self, window: int | None, position: int) -> int:
        """The first block that `position` sees: a window of w shows itself and w-1 before it."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def num_unclaimed_tokens(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of `num_tokens` from `start` no other running request is about to compute.

        0 tells the request to wait: it'll find the block in the cache. A block that it could not
        take as a hit (its last token is in it) or has begun itself is its own to compute.
        """
        if self._cache is None or request.needs_prompt_logprobs:
            return num_tokens
        first = -(-start // self.block_size)
        last = min(
            -(-(start + num_tokens) // self.block_size), (request.num_tokens - 1) // self.block_size
        )
        claimed = self._claims.first_claimed_by_other(
            request.block_hashes[first:last], request.request_id
        )
        return num_tokens if claimed is None else (first + claimed) * self.block_size - start

    # --- allocation -------------------------------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int, hit: PrefixHit | None) -> BlockIds | None:
        """Takes the hit and pages for `num_tokens` after it; returns what each table gained.

        None if the pool has too few pages: then nothing has changed (but pages behind a window may
        be free).
        """
        if self._slides and request.block_tables:
            self._release_behind_windows(request)
        start = request.num_computed_tokens if hit is None else hit.end
        num_held = len(request.block_tables[0]) if request.block_tables else 0
        num_hit = 0 if hit is None else len(hit.blocks[0])
        num_new = -(-(start + num_tokens) // self.block_size) - num_held - num_hit
        if num_new == 0 and hit is None:
            return self.no_blocks
        num_taken = num_new * len(self._windows)
        if hit is not None:
            num_taken += sum(b != NULL_BLOCK_ID and self.pool.is_free(b) for b in _flat(hit.blocks))
        if num_taken > self.pool.num_free:
            return None
        if not request.block_tables:
            request.block_tables = tuple([] for _ in self._windows)
        if hit is not None:
            self._take_hit(request, hit)
        for table in request.block_tables:
            table.extend(self._take_page(request.tenant) for _ in range(num_new))
        request.num_blocks += max(0, num_new) * len(self._windows)
        return tuple(tuple(table[num_held:]) for table in request.block_tables)

    def _take_hit(self, request: Request, hit: PrefixHit) -> None:
        for table, blocks in zip(request.block_tables, hit.blocks):
            for block_id in blocks:
                if block_id != NULL_BLOCK_ID:
                    self.pool.share(block_id)
                    request.num_blocks += 1
            table.extend(blocks)
        first = request.num_computed_tokens // self.block_size
        last = hit.end // self.block_size
        self._claims.release(request.block_hashes[first:last], request.request_id)
        request.num_computed_tokens = hit.end

    def _take_page(self, tenant: str) -> int:
        block_id = self.pool.take(tenant)
        if self._cache is not None:
            self._cache.forget(block_id)
        return block_id

    def _release_behind_windows(self, request: Request) -> None:
        for window, table in zip(self._windows, request.block_tables):
            visible = min(self._first_visible(window, request.num_computed_tokens), len(table))
            for i in range(visible - 1, -1, -1):
                if table[i] == NULL_BLOCK_ID:
                    break  # all before it are null already
                self._release(table[i])
                table[i] = NULL_BLOCK_ID
                request.num_blocks -= 1

    def _release(self, block_id: int) -> None:
        keep = self._cache is not None and self._cache.holds(block_id)
        self.pool.release(block_id, keep)

    def free(self, request: Request) -> None:
        """Gives back all pages and claims; the tail will be evicted before the head."""
        for column in reversed(list(zip(*request.block_tables))):
            for block_id in column:
                if block_id != NULL_BLOCK_ID:
                    self._release(block_id)
        request.block_tables = ()
        request.num_blocks = 0
        first = request.num_computed_tokens // self.block_size
        self._claims.release(request.block_hashes[first:], request.request_id)

    # --- drafts -----------------------------------------------------------------------------------

    def num_draft_tokens(self, request: Request, most: int) -> int:
        """How many tokens past the known ones, up to `most`, its pages and blank ones can hold."""
        num_blocks = len(request.block_tables[0]) + self.pool.num_blank // len(self._windows)
        return max(0, min(most, num_blocks * self.block_size - request.num_tokens))

    def allocate_drafts(self, request: Request, num_drafts: int) -> BlockIds:
        """Blank pages for tokens past the known ones; returns what each table gained."""
        num_held = len(request.block_tables[0])
        num_new = self.num_new_blocks(request, request.num_tokens + num_drafts)
        num_new = max(0, num_new // len(self._windows))
        if num_new == 0:
            return self.no_blocks
        assert num_new * len(self._windows) <= self.pool.num_blank, "drafts evict nothing"
        for table in request.block_tables:
            table.extend(self._take_page(request.tenant) for _ in range(num_new))
        request.num_blocks += num_new * len(self._windows)
        return tuple(tuple(table[num_held:]) for table in request.block_tables)

    def has_sharers_in_step(self, request: Request) -> bool:
        """Whether another request uses a page that this one's rows of the step in the making fill."""
        return any(map(self.pool.is_shared, self._pending.get(request.request_id, ())))

    def trim(self, request: Request) -> None:
        """Gives back pages past the computed tokens: rejected drafts wrote there."""
        num_kept = -(-request.num_computed_tokens // self.block_size)
        for table in request.block_tables:
            for block_id in reversed(table[num_kept:]):
                self._release(block_id)
                request.num_blocks -= 1
            del table[num_kept:]

    def register_accepted(self, request: Request) -> None:
        """Blocks that accepted drafts have made full can be hit from now on."""
        size = self.block_size
        first = (request.num_computed_tokens - request.num_uncached_tokens) // size
        last = request.num_computed_tokens // size
        request.num_uncached_tokens = 0
        if self._cache is None or first == last:
            return
        self._extend_hashes(request)
        for i in range(first, last):
            self._register_block(request, i)

    # --- what a step adds to the cache ------------------------------------------------------------

    def register_scheduled(self, request: Request, num_tokens: int) -> None:
        """This step computes `num_tokens` more: blocks it makes full can be hit from now on."""
        if self._cache is None:
            return
        size = self.block_size
        first = request.num_computed_tokens // size
        last = (request.num_computed_tokens + num_tokens) // size
        if first != last:
            self._extend_hashes(request)
            self._claims.release(request.block_hashes[first:last], request.request_id)
            pending = self._pending.setdefault(request.request_id, [])
            for i in range(first, last):
                pending += self._register_block(request, i)
        if last < len(request.block_hashes):
            self._claims.claim(request.block_hashes[last:], request.request_id)

    def _register_block(self, request: Request, i: int) -> list[int]:
        """Makes full block `i` findable in every group; returns the pages that nobody had before.

        Behind a window a block does without its parent.
        """
        assert self._cache is not None, "without a cache nothing is registered"
        size, hashes = self.block_size, request.block_hashes
        tokens = request.token_ids[i * size : (i + 1) * size]
        salt = self._salt(request, i)
        registered = []
        for group, (window, table) in enumerate(zip(self._windows, request.block_tables)):
            parent = hashes[i - 1] if i > 0 and window is None else None
            if table[i] == NULL_BLOCK_ID:
                continue  # behind the window before it was offered
            if self._cache.register(group, table[i], hashes[i], tokens, salt, parent):
                registered.append(table[i])
                if salt is None:
                    self.pool.make_public(table[i])
        return registered

    def confirm_step(self, broken: Iterable[int] = ()) -> None:
        """The step returned: what it computed stays, except blocks of `broken` requests."""
        for request_id in broken:
            self._forget(self._pending.get(request_id, ()))
        self._pending.clear()

    def discard_step(self) -> None:
        """The step failed: nothing of what it computed can be found any more."""
        for block_ids in self._pending.values():
            self._forget(block_ids)
        self._pending.clear()

    def forget_content(self, request: Request) -> None:
        """Takes every page that the request holds out of the cache; sharers keep theirs."""
        for table in request.block_tables:
            self._forget(table)

    def reset_prefix_cache(self) -> None:
        """While nobody holds pages: nothing computed so far can be found any more."""
        if self._cache is not None:
            self._forget(self._cache.blocks())

    def _forget(self, block_ids: Iterable[int]) -> None:
        if self._cache is not None:
            for block_id in block_ids:
                self._cache.forget(block_id)
                self.pool.drop_content(block_id)

    # --- checks -----------------------------------------------------------------------------------

    def check_invariants(self, running: Iterable[Request]) -> None:
        """Recomputes everything from the block tables of the running requests."""
        running = list(running)
        tables = [table for request in running for table in request.block_tables]
        held = [block_id for table in tables for block_id in table if block_id != NULL_BLOCK_ID]
        self.pool.check_invariants(held, self._is_leaf)
        for request in running:
            lengths = {len(table) for table in request.block_tables}
            assert len(lengths) == 1, f"request {request.request_id}: tables differ in length"
            assert lengths.pop() * self.block_size >= request.num_computed_tokens
            num_held = sum(b != NULL_BLOCK_ID for table in request.block_tables for b in table)
            assert request.num_blocks == num_held
        assert self._claims.owners() <= {request.request_id for request in running}
        if self._cache is not None:
            self._cache.check_invariants()

    def _is_leaf(self, block_id: int) -> bool:
        return self._cache is None or self._cache.is_leaf(block_id)


def _flat(blocks: BlockIds) -> Iterable[int]:
    return (block_id for group in blocks for block_id in group)
