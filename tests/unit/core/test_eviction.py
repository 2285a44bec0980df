"""Whose cached page goes next: random operations against a twin that looks at everything, and what tenants are promised."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from core_harness import FULL, prefix_cache, sampling
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from poise.core.block_pool import BlockPool
from poise.core.eviction import PUBLIC
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.request import Request, RequestOwner
from poise.core.tenant import Tenant, TenantTable

NAMES = ("a", "b", "c")


@dataclass
class Page:
    """A page as the twin sees it."""

    owner: str
    num_references: int = 1
    block: bytes | None = None  # the hash of what it holds, if that can be found
    parent: bytes | None = None
    last_used: int = 0


class Twin:
    """The rules of `EvictionOrder.victim`, each time from scratch."""

    def __init__(self, num_pages: int, shares: dict[str, float]) -> None:
        self.num_pages = num_pages
        self.shares = shares
        self.pages: dict[int, Page] = {}  # those that are not blank
        self.now = 0

    def limit(self, name: str) -> float:
        return self.num_pages if name == PUBLIC else self.shares[name] * self.num_pages

    def count(self, name: str) -> int:
        return sum(page.owner == name for page in self.pages.values())

    def held(self, name: str) -> int:
        return sum(page.owner == name and page.num_references > 0 for page in self.pages.values())

    def evictable(self) -> dict[int, Page]:
        return {number: page for number, page in self.pages.items() if page.num_references == 0}

    def is_leaf(self, page: Page) -> bool:
        return all(other.parent != page.block for other in self.pages.values() if other.block)

    def victim(self, name: str) -> int:
        pages = self.evictable()
        own = {n: p for n, p in pages.items() if p.owner == name}
        over = {n: p for n, p in pages.items() if self.count(p.owner) > self.limit(p.owner)}
        private = {n: p for n, p in pages.items() if p.owner != PUBLIC}
        if own and self.count(name) + 1 > self.limit(name):
            chosen = own
        else:
            chosen = over or own or private or pages
        leaves = {n: p for n, p in chosen.items() if self.is_leaf(p)} or chosen
        return min(leaves, key=lambda number: leaves[number].last_used)


class EvictionMachine(RuleBasedStateMachine):
    """The pool and the prefix cache's leaves, page by page."""

    @initialize(
        num_pages=st.integers(1, 12),
        shares=st.tuples(*[st.sampled_from([0.0, 0.2, 0.34, 0.5, 1.0]) for _ in NAMES]),
    )
    def start(self, num_pages: int, shares: tuple[float, ...]) -> None:
        self.pool = BlockPool(num_pages)
        self.cache = prefix_cache(1)
        self.cache.watch_leaves(self.pool.order.set_leaf)
        self.twin = Twin(num_pages, {})
        self.num_blocks = 0
        self.set_shares(shares)

    @rule(shares=st.tuples(*[st.sampled_from([0.0, 0.2, 0.34, 0.5, 1.0]) for _ in NAMES]))
    def set_shares(self, shares: tuple[float, ...]) -> None:
        self.twin.shares = dict(zip(NAMES, shares))
        self.pool.order.set_shares(self.twin.shares.__getitem__)

    @precondition(lambda self: self.pool.num_free)
    @rule(name=st.sampled_from(NAMES))
    def take(self, name: str) -> None:
        blank = len(self.twin.pages) < self.twin.num_pages
        expected = None if blank else self.twin.victim(name)
        if expected is not None:
            self.check_promise(name, self.twin.pages[expected].owner)
            del self.twin.pages[expected]
        page = self.pool.take(name)
        self.cache.forget(page)
        assert expected in (None, page)
        assert page not in self.twin.pages
        self.twin.pages[page] = Page(name)
        self.check()

    def check_promise(self, name: str, loser: str) -> None:
        """Where the shares fit the pool and running requests keep to them, only those over theirs,
        or the asking tenant, lose anything.
        """
        twin = self.twin
        public = twin.count(PUBLIC)
        promised = sum(twin.limit(other) for other in NAMES) + public
        if promised > twin.num_pages or twin.held(name) + 1 > twin.limit(name):
            return
        if all(twin.held(other) <= twin.limit(other) for other in NAMES):
            assert loser == name or twin.count(loser) > twin.limit(loser)

    def chosen(self, which: int, *, held: bool) -> int | None:
        numbers = sorted(n for n, p in self.twin.pages.items() if (p.num_references > 0) == held)
        return numbers[which % len(numbers)] if numbers else None

    @rule(which=st.integers(0, 100), parent=st.integers(-3, 30), public=st.booleans())
    def register(self, which: int, parent: int, public: bool) -> None:
        """A held page becomes findable, as the child of any block that there has ever been."""
        number = self.chosen(which, held=True)
        if number is None or self.twin.pages[number].block is not None:
            return
        page = self.twin.pages[number]
        page.block = b"%d" % self.num_blocks
        page.parent = (
            b"%d" % (parent % self.num_blocks) if parent >= 0 and self.num_blocks else None
        )
        self.num_blocks += 1
        assert self.cache.register(0, number, page.block, [0], parent=page.parent)
        if public:
            page.owner = PUBLIC
            self.pool.make_public(number)
        self.check()

    @rule(which=st.integers(0, 100), lost=st.integers(0, 30))
    def register_again(self, which: int, lost: int) -> None:
        """A block that was evicted comes back while its children are still there."""
        number = self.chosen(which, held=True)
        block = b"%d" % lost
        present = {page.block for page in self.twin.pages.values()}
        if (
            number is None
            or self.twin.pages[number].block
            or lost >= self.num_blocks
            or block in present
        ):
            return
        self.twin.pages[number].block = block
        assert self.cache.register(0, number, block, [0])
        self.check()

    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        number = self.chosen(which, held=True)
        if number is None:
            return
        page = self.twin.pages[number]
        self.pool.release(number, keep_content=page.block is not None)
        page.num_references -= 1
        if page.num_references == 0:
            self.twin.now += 1
            page.last_used = self.twin.now
            if page.block is None:
                del self.twin.pages[number]
        self.check()

    @rule(which=st.integers(0, 100), held=st.booleans())
    def share(self, which: int, held: bool) -> None:
        number = self.chosen(which, held=held)
        if number is not None and self.twin.pages[number].block is not None:
            self.pool.share(number)
            self.twin.pages[number].num_references += 1
            self.check()

    @rule(which=st.integers(0, 100), held=st.booleans())
    def forget(self, which: int, held: bool) -> None:
        number = self.chosen(which, held=held)
        if number is None or self.twin.pages[number].block is None:
            return
        self.cache.forget(number)
        self.pool.drop_content(number)
        self.twin.pages[number].block = self.twin.pages[number].parent = None
        if not held:
            del self.twin.pages[number]
        self.check()

    def check(self) -> None:
        held = [n for n, page in self.twin.pages.items() for _ in range(page.num_references)]
        self.pool.check_invariants(held, self.cache.is_leaf)
        self.cache.check_invariants()
        for name in (*NAMES, PUBLIC):
            assert self.pool.order.num_pages_of(name) == self.twin.count(name)


TestEviction = EvictionMachine.TestCase
TestEviction.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_the_order_stays_small_however_often_a_page_is_used() -> None:
    pool = BlockPool(4)
    pages = [pool.take("a") for _ in range(4)]
    for page in pages:
        pool.release(page, keep_content=True)
    for _ in range(5000):
        pool.share(pages[0])
        pool.release(pages[0], keep_content=True)
    page = pool.take("a")
    heap = pool.order._accounts["a"].leaves
    assert page == pages[1]
    assert len(heap.entries) < 100


# --- what tenants are promised, at the manager ----------------------------------------------------


class Cache:
    """Prompts computed and given back, one after the other, by tenants with shares."""

    def __init__(self, num_blocks: int, block_size: int = 2, **quotas: float) -> None:
        self.manager = KVCacheManager(FULL, num_blocks, block_size, prefix_cache(block_size))
        table = {name: Tenant(name, kv_quota=quota) for name, quota in quotas.items()}
        self.manager.set_tenants(TenantTable(table))
        self.num_requests = 0

    def request(self, tenant: str, tokens: list[int], num_public_tokens: int = 0) -> Request:
        self.num_requests += 1
        owner = RequestOwner(
            tenant, cache_salt=tenant.encode(), num_public_tokens=num_public_tokens
        )
        return Request.create(self.num_requests, tokens, sampling(), 1, 0.0, owner)

    def compute(self, tenant: str, tokens: list[int], num_public_tokens: int = 0) -> int:
        """Takes what is cached, computes the rest and leaves; returns the number of cached tokens."""
        request = self.request(tenant, tokens, num_public_tokens)
        hit = self.manager.lookup(request)
        cached = 0 if hit is None else hit.end
        assert self.manager.allocate(request, len(tokens) - cached, hit) is not None
        self.manager.register_scheduled(request, len(tokens) - cached)
        self.manager.confirm_step()
        request.num_computed_tokens = len(tokens)
        self.manager.check_invariants([request])
        self.manager.free(request)
        self.manager.check_invariants([])
        return cached

    def num_cached(self, tenant: str, tokens: list[int], num_public_tokens: int = 0) -> int:
        """What the tenant would find of a prompt now."""
        hit = self.manager.lookup(self.request(tenant, tokens, num_public_tokens))
        return 0 if hit is None else hit.end


def prompt(number: int, length: int = 9) -> list[int]:
    return [1000 + number] * length


def test_a_flood_does_not_flush_another_tenants_share() -> None:
    cache = Cache(40, light=0.25, heavy=0.75)
    for number in range(2):
        cache.compute("light", prompt(number))
    for number in range(200):
        cache.compute("heavy", prompt(number))
    for number in range(2):
        assert cache.num_cached("light", prompt(number)) == 8
    # The flood evicted its own oldest: the newest are there.
    assert cache.num_cached("heavy", prompt(199)) == 8
    assert cache.num_cached("heavy", prompt(100)) == 0


def test_what_is_over_a_share_goes_when_another_tenant_needs_it() -> None:
    cache = Cache(40, light=0.25, heavy=0.75)
    for number in range(9):
        cache.compute("heavy", prompt(number))  # 36 of 40 pages, 30 are its share
    for number in range(3):
        cache.compute("light", prompt(number))
    assert [cache.num_cached("heavy", prompt(number)) for number in range(4)] == [0, 4, 8, 8]
    assert [cache.num_cached("light", prompt(number)) for number in range(3)] == [2, 8, 8]
    assert cache.manager.pool.order.num_pages_of("heavy") == 30


def test_an_idle_tenants_pages_are_lent_out_beyond_its_share_only() -> None:
    cache = Cache(20, one=0.5, other=0.5)
    for number in range(5):
        cache.compute("one", prompt(number))
    for number in range(50):
        cache.compute("other", prompt(number))
    assert cache.manager.pool.order.num_pages_of("one") == 10
    assert [cache.num_cached("one", prompt(number)) for number in range(5)] == [0, 0, 4, 8, 8]


def test_quotas_that_exceed_the_pool_together_protect_in_proportion() -> None:
    table = TenantTable({"a": Tenant("a"), "b": Tenant("b", kv_quota=0.5), "c": Tenant("c")})
    assert [table.protected_share(name) for name in "abcd"] == [0.4, 0.2, 0.4, 0.0]
    assert TenantTable().protected_share("anybody") == 1.0
    small = TenantTable({"a": Tenant("a", kv_quota=0.3)})
    assert small.protected_share("a") == 0.3


def test_without_tenants_the_order_is_least_recently_used() -> None:
    cache = Cache(12)
    for number in range(3):
        cache.compute("default", prompt(number, 8))
    assert cache.compute("default", prompt(0)) == 8  # 0 is used again, and takes a page of 1
    cache.compute("default", prompt(9, 4))
    assert [cache.num_cached("default", prompt(number)) for number in range(3)] == [8, 4, 8]


def test_a_public_prefix_is_computed_once_for_all_and_evicted_last() -> None:
    cache = Cache(24, one=0.5, other=0.5)
    system = list(range(8))
    assert cache.compute("one", [*system, 1, 1, 1], num_public_tokens=8) == 0
    assert cache.compute("other", [*system, 1, 1, 1], num_public_tokens=8) == 8
    assert cache.compute("other", [*system, 1, 1, 1], num_public_tokens=8) == 10
    assert cache.manager.pool.order.num_pages_of(PUBLIC) == 4
    for number in range(50):
        cache.compute(("one", "other")[number % 2], prompt(number))
    assert cache.num_cached("one", [*system, 9], num_public_tokens=8) == 8


def test_a_public_prefix_ends_at_the_last_whole_block() -> None:
    cache = Cache(24, one=0.5, other=0.5)
    tokens = list(range(9))
    cache.compute("one", tokens, num_public_tokens=5)
    assert cache.num_cached("other", tokens, num_public_tokens=5) == 4


def test_protected_pages_give_way_where_nothing_else_is_left() -> None:
    cache = Cache(8, small=1.0)
    cache.compute("small", prompt(1))
    assert cache.compute("stranger", prompt(2, 15)) == 0  # takes all 8 pages
    assert cache.num_cached("small", prompt(1)) == 0


@pytest.mark.parametrize("reused", [False, True])
def test_a_block_that_others_continue_stays_longer_than_they_do(reused: bool) -> None:
    """The head of two prompts was used before the tail of the first was; it goes after both."""
    cache = Cache(5)
    first, second = [1, 1, 2, 2], [1, 1, 3, 3]
    a, b = cache.request("x", first), cache.request("x", second)
    for request in (a, b):  # both compute the head: b's own page of it can't be found
        assert cache.manager.allocate(request, 4, None) is not None
        cache.manager.register_scheduled(request, 4)
        cache.manager.confirm_step()
        request.num_computed_tokens = 4
    for request in (a, b):
        cache.manager.free(request)
    cache.manager.check_invariants([])
    if reused:
        cache.compute("x", [1, 1, 2, 2])
    cache.compute("x", [8] * 4)  # two blank pages
    cache.compute("x", [9] * 2)
    assert cache.num_cached("x", [1, 1, 0]) == 2
    cache.manager.check_invariants([])
