"""Which unreferenced page loses its content next, so that no tenant can flush another's share.

Knows pages by number, whose they are, when they were last used and which are leaves (no cached block
continues them); does not know hashes, tokens or references. Invariant: a page is in exactly one
account while it holds or may hold somebody's content, and `victim` never names a page of a tenant
within its share while a page of anybody over his, or of the asking tenant's own, could go instead.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

PUBLIC = "*public*"
"""The account of the pages of a public prefix: everybody's, evicted last. No tenant has this name."""

MIN_COMPACTION = 64


@dataclass(slots=True)
class _Heap:
    """Pages by last use. An entry counts while the page's last use is the one that it names."""

    entries: list[tuple[int, int]] = field(default_factory=list)
    num_pages: int = 0

    def push(self, last_used: int, page: int) -> None:
        heapq.heappush(self.entries, (last_used, page))
        self.num_pages += 1


@dataclass(slots=True)
class _Account:
    """One tenant's pages. `num_pages` counts all of them, the heaps hold those that may be taken."""

    name: str
    limit: float  # pages that others can't flush
    num_pages: int = 0
    leaves: _Heap = field(default_factory=_Heap)
    inner: _Heap = field(default_factory=_Heap)

    @property
    def is_over(self) -> bool:
        return self.num_pages > self.limit

    @property
    def num_evictable(self) -> int:
        return self.leaves.num_pages + self.inner.num_pages


class EvictionOrder:
    """Unreferenced pages with content, in the order in which they would be taken.

    Each operation takes time logarithmic in the pages, and linear in the tenants that are over their
    share only where the asking one is not.
    """

    def __init__(self, num_pages: int, share_of: Callable[[str], float] = lambda name: 1.0) -> None:
        self._num_pages = num_pages
        self._share_of = share_of
        self._accounts: dict[str, _Account] = {}
        self._account_by_page: dict[int, _Account] = {}
        self._last_used: dict[int, int] = {}  # of the pages that may be taken
        self._inner: set[int] = set()  # pages that a cached block continues
        self._now = 0

    # --- whose a page is --------------------------------------------------------------------------

    def charge(self, page: int, name: str) -> None:
        """The page is `name`'s from now on."""
        assert page not in self._last_used, f"page {page} changes hands while it may be taken"
        before = self._account_by_page.get(page)
        if before is not None and before.name == name:
            return
        self.credit(page)
        account = self._account(name)
        account.num_pages += 1
        self._account_by_page[page] = account

    def credit(self, page: int) -> None:
        """The page holds nothing of anybody's."""
        assert page not in self._last_used, f"page {page} may still be taken for its content"
        account = self._account_by_page.pop(page, None)
        if account is not None:
            account.num_pages -= 1
            if account.num_pages == 0:
                del self._accounts[account.name]

    def set_shares(self, share_of: Callable[[str], float]) -> None:
        """Other shares of the pool, 0 to 1, from now on."""
        self._share_of = share_of
        for account in self._accounts.values():
            account.limit = self._limit(account.name)

    def is_charged(self, page: int) -> bool:
        return page in self._account_by_page

    def num_pages_of(self, name: str) -> int:
        account = self._accounts.get(name)
        return 0 if account is None else account.num_pages

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(name, self._limit(name))
        return account

    def _limit(self, name: str) -> float:
        return self._num_pages if name == PUBLIC else self._share_of(name) * self._num_pages

    # --- what may be taken ------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._last_used)

    def __contains__(self, page: int) -> bool:
        return page in self._last_used

    def add(self, page: int) -> None:
        """The last reference to a page with content has gone: it was used just now."""
        self._now += 1
        self._last_used[page] = self._now
        self._heap_of(page).push(self._now, page)

    def remove(self, page: int) -> None:
        """The page is referenced again, or taken."""
        self._heap_of(page).num_pages -= 1
        del self._last_used[page]

    def set_leaf(self, page: int, is_leaf: bool) -> None:
        """Whether no cached block continues what the page holds, or may come to hold."""
        if is_leaf == (page not in self._inner):
            return
        last_used = self._last_used.get(page)
        if last_used is not None:
            self._heap_of(page).num_pages -= 1
        if is_leaf:
            self._inner.discard(page)
        else:
            self._inner.add(page)
        if last_used is not None:
            self._heap_of(page).push(last_used, page)

    def victim(self, name: str) -> int:
        """The page that goes for one of `name`'s. Of the first of these accounts that have any:

        1. `name`'s own, if one page more is over its share: who floods the cache flushes himself;
        2. those over their share;
        3. `name`'s own;
        4. the others, whose pages are then all that running requests left; a public prefix at last.

        Among accounts alike the least recently used leaf; an inner page only where no leaf is left.
        """
        own = self._accounts.get(name)
        if own is not None and own.num_evictable == 0:
            own = None
        if own is not None and own.num_pages + 1 > own.limit:
            return self._oldest((own,))
        over = [a for a in self._accounts.values() if a.is_over and a.num_evictable]
        if over:
            return self._oldest(over)
        if own is not None:
            return self._oldest((own,))
        rest = [a for a in self._accounts.values() if a.num_evictable]
        assert rest, "no page can be taken"
        return self._oldest([a for a in rest if a.name != PUBLIC] or rest)

    def _oldest(self, accounts: Sequence[_Account]) -> int:
        for inner in (False, True):
            found = [entry for a in accounts if (entry := self._top(a, inner)) is not None]
            if found:
                return min(found)[1]
        raise AssertionError("an account counts pages that it doesn't have")

    def _top(self, account: _Account, inner: bool) -> tuple[int, int] | None:
        """The account's least recently used leaf, or inner page; drops entries that no longer stand."""
        heap = account.inner if inner else account.leaves
        if len(heap.entries) > 2 * heap.num_pages + MIN_COMPACTION:
            heap.entries = list({entry for entry in heap.entries if self._stands(entry, inner)})
            heapq.heapify(heap.entries)
        entries = heap.entries
        while entries and not self._stands(entries[0], inner):
            heapq.heappop(entries)
        return entries[0] if entries else None

    def _stands(self, entry: tuple[int, int], inner: bool) -> bool:
        """Whether an entry of a heap of inner pages, or of leaves, still means anything."""
        last_used, page = entry
        return self._last_used.get(page) == last_used and (page in self._inner) == inner

    def _heap_of(self, page: int) -> _Heap:
        account = self._account_by_page[page]
        return account.inner if page in self._inner else account.leaves

    # --- checks -----------------------------------------------------------------------------------

    def check_invariants(self, is_leaf: Callable[[int], bool]) -> None:
        """Recounts everything. `is_leaf` says of a page that may be taken whether nothing continues it."""
        for page in self._last_used:
            assert page in self._account_by_page, f"page {page} may be taken and is nobody's"
            assert is_leaf(page) == (page not in self._inner), f"page {page}: leaf or not?"
        for name, account in self._accounts.items():
            pages = [page for page, other in self._account_by_page.items() if other is account]
            assert len(pages) == account.num_pages > 0, f"{name}: wrong number of pages"
            for inner, heap in ((False, account.leaves), (True, account.inner)):
                standing = {entry[1] for entry in heap.entries if self._stands(entry, inner)}
                expected = {
                    page
                    for page in pages
                    if page in self._last_used and (page in self._inner) == inner
                }
                assert standing == expected, f"{name}: pages in its order are not those that may go"
                assert heap.num_pages == len(expected), f"{name}: wrong number of pages to take"
