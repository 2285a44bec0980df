"""The requests that run, and the pages that they hold: for each tenant and in all.

Knows pages and holdings, no order of admission but its own and no policy. Invariant: what the holdings
say is what the running requests' tables hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from poise.core.kv_cache_manager import BlockIds, KVCacheManager, PrefixHit
from poise.core.limits import Limits
from poise.core.request import Request, RequestStatus
from poise.core.reservations import Holdings, Reservations


class RunningRequests:
    """In order of admission. `removed` are those that left since the executor was last told."""

    def __init__(
        self, kv_cache: KVCacheManager, limits: Limits, reservations: Reservations
    ) -> None:
        self.kv_cache = kv_cache
        self.holdings = Holdings()
        self.requests: list[Request] = []
        self.removed: list[int] = []
        self._limits = limits
        self._reservations = reservations

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def is_full(self) -> bool:
        return len(self.requests) >= self._limits.max_num_running

    def enter(self, request: Request, num_tokens: int, hit: PrefixHit | None) -> None:
        """A request begins to run, with pages for `num_tokens` after its hit; `fits` promised them."""
        new_block_ids = self.kv_cache.allocate(request, num_tokens, hit)
        assert new_block_ids is not None, "fits promised pages"
        request.status = RequestStatus.RUNNING
        self.requests.append(request)
        self.holdings.enter(request)

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        self.removed.append(request.request_id)
        self.holdings.leave(request)
        self.kv_cache.free(request)

    # --- pages ------------------------------------------------------------------------------------

    def take_pages(
        self, request: Request, num_tokens: int, hit: PrefixHit | None
    ) -> BlockIds | None:
        """As `KVCacheManager.allocate`, for one that runs."""
        num_held = request.num_blocks
        new_block_ids = self.kv_cache.allocate(request, num_tokens, hit)
        if request.num_blocks != num_held:  # also where it got none: pages behind windows are free
            self.holdings.add_blocks(request, request.num_blocks - num_held)
        return new_block_ids

    def num_draft_tokens(self, request: Request, most: int) -> int:
        """How many drafts, up to `most`, find pages that hold nothing of use, within the tenant's quota."""
        num_tokens = self.kv_cache.num_draft_tokens(request, most)
        while num_tokens > 0 and self.passes_quota(request, request.num_tokens + num_tokens):
            num_tokens -= 1
        return num_tokens

    def take_draft_pages(self, request: Request, num_drafts: int) -> BlockIds:
        """Pages for drafts that `num_draft_tokens` has promised, those it has already not counted."""
        num_held = request.num_blocks
        block_ids = self.kv_cache.allocate_drafts(request, num_drafts)
        if request.num_blocks != num_held:
            self.holdings.add_blocks(request, request.num_blocks - num_held)
        return block_ids

    def return_draft_pages(self, request: Request) -> None:
        """Gives back pages past what is computed."""
        num_held = request.num_blocks
        self.kv_cache.trim(request)
        if request.num_blocks != num_held:
            self.holdings.add_blocks(request, request.num_blocks - num_held)

    def fits(self, request: Request, hit: PrefixHit | None, num_spare: int = 0) -> bool:
        """Whether the free pages do for a newcomer, with `num_spare` to spare and, where others run,
        the watermark's.
        """
        if self.requests:
            watermark = int(self._limits.watermark * self.kv_cache.pool.num_blocks)
            num_spare = max(num_spare, watermark)
        chunk = self._limits.max_num_batched_tokens
        return self.kv_cache.fits_now(request, hit, chunk, num_spare)

    def next_need_of_oldest(self) -> int:
        """Pages that the oldest may lack in this step."""
        if not self.requests:
            return 0
        oldest = self.requests[0]
        end = oldest.num_computed_tokens + self._limits.max_num_batched_tokens
        return self.kv_cache.num_new_blocks(oldest, min(oldest.num_tokens, end))

    def passes_quota(self, request: Request, end: int) -> bool:
        """Whether its tenant would hold more pages than its quota if the request held positions
        before `end`.
        """
        quota = self._reservations.quotas.get(request.tenant)
        if quota is None:
            return False
        held = self.holdings.tenant(request.tenant).num_blocks
        return held + self.kv_cache.num_new_blocks(request, end) > quota

    def check_invariants(self) -> None:
        assert len(self.requests) <= self._limits.max_num_running
        self.holdings.check_invariants(self.requests)
        self.kv_cache.check_invariants(self.requests)
