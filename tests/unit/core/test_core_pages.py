"""The page pool, block identity, and the manager's promises about pages."""

from __future__ import annotations

import pytest
from core_harness import FULL, FULL_AND_SLIDING, prefix_cache, sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.block_pool import NULL_BLOCK_ID, BlockPool
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.output import KVGroupSpec
from poise.core.prefix_cache import PrefillClaims, PrefixCache
from poise.core.request import Request, RequestOwner


def make_request(
    tokens: list[int], request_id: int = 0, salt: bytes = b"", **params: object
) -> Request:
    return Request.create(
        request_id, tokens, sampling(**params), 1, 0.0, RequestOwner(cache_salt=salt)
    )


# --- the pool -------------------------------------------------------------------------------------


def test_free_pages_go_out_least_recently_used_first_and_useless_ones_before_all() -> None:
    pool = BlockPool(4)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    for block_id, keep_content in [(2, True), (0, True), (3, False), (1, True)]:
        pool.release(block_id, keep_content)
    assert [pool.take() for _ in range(4)] == [3, 2, 0, 1]


def test_a_shared_page_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(2)
    block_id = pool.take()
    pool.share(block_id)
    pool.release(block_id, keep_content=True)
    assert pool.num_free == 1
    pool.release(block_id, keep_content=True)
    assert pool.num_free == 2
    pool.share(block_id)  # a free page is revived for its content
    assert pool.num_free == 1
    pool.check_invariants([block_id])


def test_pool_invariants_notice_a_lost_and_an_unknown_reference() -> None:
    pool = BlockPool(2)
    block_id = pool.take()
    with pytest.raises(AssertionError, match="wrong count"):
        pool.check_invariants([])
    with pytest.raises(AssertionError, match="do not exist"):
        pool.check_invariants([block_id, 7])
    with pytest.raises(AssertionError, match="not held"):
        pool.release(1, keep_content=False)


# --- block identity -------------------------------------------------------------------------------


def hashes(cache: PrefixCache, tokens: list[int], salt: bytes = b"") -> list[bytes]:
    result: list[bytes] = []
    cache.extend_hashes(result, tokens, salt)
    return result


def test_a_hash_names_all_tokens_before_it_and_every_identity_field() -> None:
    base = hashes(prefix_cache(2), [1, 2, 3, 4, 5])
    assert len(base) == 2
    assert base == hashes(prefix_cache(2), [1, 2, 3, 4, 9])
    assert base[0] == hashes(prefix_cache(2), [1, 2, 7, 7])[0]
    others = [
        hashes(prefix_cache(2), [0, 2, 3, 4]),
        hashes(prefix_cache(2), [2, 1, 3, 4]),
        hashes(prefix_cache(2, identity=b"other"), [1, 2, 3, 4]),
        hashes(prefix_cache(2, key=b"other"), [1, 2, 3, 4]),
        hashes(prefix_cache(2), [1, 2, 3, 4], salt=b"tenant"),
        hashes(prefix_cache(2, identity=b"mode"), [1, 2, 3, 4], salt=b"l"),
        hashes(prefix_cache(2, identity=b""), [1, 2, 3, 4], salt=b"model"),
    ]
    seen = [digest for one in [base, *others] for digest in one]
    assert len(set(seen)) == len(seen)
    assert all(len(digest) == 32 for digest in seen)


def test_hashes_can_be_extended_in_any_portions() -> None:
    cache = prefix_cache(2)
    grown: list[bytes] = []
    for end in range(12):
        cache.extend_hashes(grown, list(range(end)), b"")
    assert grown == hashes(cache, list(range(11)))


def test_a_hit_compares_token_ids_and_salt_too() -> None:
    cache = prefix_cache(2)
    assert cache.register(0, 5, b"same hash", [1, 2])
    assert cache.find(0, b"same hash", [1, 2]) == 5
    assert cache.find(0, b"same hash", [1, 3]) is None
    assert not cache.register(0, 6, b"same hash", [1, 2])  # the first page stays
    assert cache.find(0, b"same hash", [1, 2], b"") is None  # public, so not for one salt
    assert cache.register(0, 7, b"private", [1, 2], b"one salt")
    assert cache.find(0, b"private", [1, 2], b"one salt") == 7
    assert cache.find(0, b"private", [1, 2], b"another") is None
    assert cache.find(0, b"private", [1, 2]) is None
    cache.check_invariants()
    cache.forget(5)
    cache.forget(5)
    assert cache.find(0, b"same hash", [1, 2]) is None


def test_claims_belong_to_the_first_who_takes_them() -> None:
    claims = PrefillClaims()
    claims.claim([b"a", b"b"], 1)
    claims.claim([b"b", b"c"], 2)
    assert claims.first_claimed_by_other([b"a", b"b", b"c"], 1) == 2
    assert claims.first_claimed_by_other([b"c", b"b"], 2) == 1
    claims.release([b"a", b"b", b"c"], 1)
    assert claims.owners() == {2}
    assert claims.first_claimed_by_other([b"a", b"b", b"c"], 2) is None


# --- the manager ----------------------------------------------------------------------------------


class Pages:
    """A manager with requests computed at will."""

    def __init__(self, groups: tuple[KVGroupSpec, ...], num_blocks: int, block_size: int) -> None:
        self.manager = KVCacheManager(
            groups, num_blocks, block_size, prefix_cache(block_size, len(groups))
        )
        self.running: list[Request] = []

    def compute(self, request: Request, num_tokens: int) -> None:
        """One chunk without a hit."""
        assert self.manager.allocate(request, num_tokens, None) is not None
        if request not in self.running:
            self.running.append(request)
        self.manager.register_scheduled(request, num_tokens)
        self.manager.confirm_step()
        request.num_computed_tokens += num_tokens
        self.manager.check_invariants(self.running)

    def free(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)
        self.manager.check_invariants(self.running)


def test_a_failing_allocation_changes_nothing() -> None:
    pages = Pages(FULL, num_blocks=4, block_size=2)
    pages.compute(make_request([1, 2, 3, 4]), 4)
    other = make_request([9] * 6, request_id=1)
    assert pages.manager.allocate(other, 5, None) is None
    assert other.block_tables == ()
    assert pages.manager.pool.num_free == 2
    assert pages.manager.allocate(other, 4, None) == ((2, 3),)


def test_pages_of_a_hit_that_are_free_are_counted_as_taken() -> None:
    pages = Pages(FULL, num_blocks=4, block_size=2)
    first = make_request([1, 2, 3, 4])
    pages.compute(first, 4)
    pages.free(first)
    pages.compute(make_request([9, 9], request_id=1), 2)
    second = make_request([1, 2, 3, 4, 5, 6, 7], request_id=2)
    hit = pages.manager.lookup(second)
    assert hit is not None
    assert (hit.start, hit.end, hit.blocks) == (0, 4, ((0, 1),))
    assert not pages.manager.fits_now(second, hit, max_chunk=8)
    assert pages.manager.allocate(second, 3, hit) is None  # 2 + 2 pages, 3 are free
    assert pages.manager.allocate(second, 2, hit) is not None
    assert second.block_tables[0][:2] == [0, 1]
    assert second.num_computed_tokens == 4


def test_the_tail_of_a_freed_request_is_evicted_before_its_head() -> None:
    pages = Pages(FULL, num_blocks=3, block_size=2)
    first = make_request([1, 2, 3, 4, 5, 6])
    pages.compute(first, 6)
    pages.free(first)
    pages.compute(make_request([9, 9], request_id=1), 2)
    hit = pages.manager.lookup(make_request([1, 2, 3, 4, 5, 6, 7], request_id=2))
    assert hit is not None
    assert hit.end == 4


def test_a_request_in_the_midst_of_its_prompt_takes_a_hit_at_a_block_edge() -> None:
    pages = Pages(FULL, num_blocks=16, block_size=4)
    request, faster = make_request([1] * 18), make_request([1] * 13, request_id=1)
    pages.compute(request, 4)
    pages.compute(faster, 13)
    hit = pages.manager.lookup(request)
    assert hit is not None
    assert (hit.start, hit.end) == (4, 12)
    expected = tuple(faster.block_tables[0][1:3])
    new_block_ids = pages.manager.allocate(request, 6, hit)
    assert new_block_ids is not None
    assert new_block_ids[0][:2] == expected
    assert len(request.block_tables[0]) == 5
    assert request.num_computed_tokens == 12
    pages.compute(request, 1)
    assert pages.manager.lookup(request) is None  # not at a block's edge


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_the_last_token_to_compute(num_tokens: int, expected: int) -> None:
    pages = Pages(FULL, num_blocks=8, block_size=4)
    pages.compute(make_request(list(range(12))), 12)
    hit = pages.manager.lookup(make_request(list(range(num_tokens)), request_id=1))
    assert (hit.end if hit else 0) == expected


def test_salt_and_prompt_logprobs_keep_requests_from_hits() -> None:
    pages = Pages(FULL, num_blocks=8, block_size=2)
    tokens = [1, 2, 3, 4, 5]
    pages.compute(make_request(tokens), 5)
    assert pages.manager.lookup(make_request(tokens, 1)) is not None
    assert pages.manager.lookup(make_request(tokens, 2, salt=b"other tenant")) is None
    assert pages.manager.lookup(make_request(tokens, 3, prompt_logprobs=0)) is None


def test_a_failed_step_leaves_nothing_in_the_cache() -> None:
    pages = Pages(FULL, num_blocks=8, block_size=2)
    request = make_request([1, 2, 3, 4, 5])
    other = make_request([1, 2, 3, 4, 6], request_id=1)
    assert pages.manager.allocate(request, 5, None) is not None
    pages.manager.register_scheduled(request, 5)
    assert pages.manager.lookup(other) is not None  # findable within the step
    pages.manager.discard_step()
    assert pages.manager.lookup(other) is None


def test_a_block_in_progress_is_left_to_its_owner() -> None:
    pages = Pages(FULL, num_blocks=32, block_size=4)
    owner = make_request([1] * 20)
    pages.compute(owner, 6)
    twin, other = make_request([1] * 20, 1), make_request([1] * 4 + [2] * 9, 2)
    for request, expected in [(twin, 0), (other, 9)]:
        hit = pages.manager.lookup(request)
        assert hit is not None
        assert hit.end == 4
        assert pages.manager.num_unclaimed_tokens(request, 4, request.num_tokens - 4) == expected
    pages.compute(owner, 10)  # what is left, 16 … 19, holds the twin's last token: no hit there
    assert pages.manager.num_unclaimed_tokens(twin, 16, 4) == 4
    pages.free(owner)
    assert pages.manager.num_unclaimed_tokens(twin, 4, 16) == 16


def test_tokens_before_a_block_in_progress_can_be_computed() -> None:
    pages = Pages(FULL, num_blocks=32, block_size=4)
    first, second = make_request([1] * 6, 0), make_request([1] * 14, 1, prompt_logprobs=0)
    pages.manager.lookup(first)
    pages.compute(first, 2)  # owns block 0
    pages.manager.lookup(second)
    pages.compute(second, 2)  # ignores claims, and owns blocks 1 and 2
    third = make_request([1] * 20, 2)
    pages.manager.lookup(third)
    pages.free(first)
    assert pages.manager.num_unclaimed_tokens(third, 0, 20) == 4


def test_pages_behind_a_window_become_null_and_free() -> None:
    pages = Pages((KVGroupSpec("sliding", 1, sliding_window=5),), num_blocks=16, block_size=2)
    request = make_request(list(range(20)))
    for _ in range(10):
        pages.compute(request, 2)
    # The chunk at 18 and 19 sees 14 and later: blocks 7, 8 and 9.
    assert request.block_tables[0][:7] == [NULL_BLOCK_ID] * 7
    assert NULL_BLOCK_ID not in request.block_tables[0][7:]
    assert pages.manager.pool.num_free == 13
    pages.free(request)
    assert pages.manager.pool.num_free == 16


def test_a_sliding_group_needs_only_its_window_for_a_hit() -> None:
    pages = Pages(FULL_AND_SLIDING, num_blocks=40, block_size=4)
    first = make_request(list(range(33)))
    for _ in range(8):
        pages.compute(first, 4)
    pages.free(first)
    hit = pages.manager.lookup(make_request(list(range(33)), request_id=1))
    assert hit is not None
    assert hit.end == 32
    # Position 32 sees 22 and later through a window of 11: from block 5 on.
    assert NULL_BLOCK_ID not in hit.blocks[0]
    assert hit.blocks[1][:5] == (NULL_BLOCK_ID,) * 5
    assert NULL_BLOCK_ID not in hit.blocks[1][5:]


def slow_hit(
    groups: tuple[KVGroupSpec, ...],
    cached: list[set[tuple[int, ...]]],
    tokens: list[int],
    size: int,
) -> int:
    """The slow twin of `lookup`: every length, longest first, over whole prefixes, no hashes."""
    for end in range((len(tokens) - 1) // size * size, 0, -size):
        if all(
            tuple(tokens[: (i + 1) * size]) in cached[g]
            for g, group in enumerate(groups)
            for i in range(end // size)
            if group.sliding_window is None or (i + 1) * size > end - group.sliding_window + 1
        ):
            return end
    return 0


@settings(max_examples=200, deadline=None)
@given(
    groups=st.sampled_from(
        [FULL, FULL_AND_SLIDING, (KVGroupSpec("a", 1, 3), KVGroupSpec("b", 1, 8))]
    ),
    size=st.integers(1, 4),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=2, max_size=5),
    dropped=st.sets(st.integers(0, 60)),
)
def test_lookup_equals_its_slow_twin(
    groups: tuple[KVGroupSpec, ...], size: int, prompts: list[list[int]], dropped: set[int]
) -> None:
    """Any subset of pages may have been evicted."""
    pages = Pages(groups, num_blocks=400, block_size=size)
    cache = pages.manager._cache
    assert cache is not None
    content: dict[int, tuple[int, tuple[int, ...]]] = {}
    for i, prompt in enumerate(prompts[:-1]):
        request = make_request(prompt, i)
        pages.compute(request, len(prompt))
        for group, table in enumerate(request.block_tables):
            for block, block_id in enumerate(table):
                if cache.holds(block_id):
                    content[block_id] = (group, tuple(prompt[: (block + 1) * size]))
    for block_id in dropped:
        cache.forget(block_id)
        content.pop(block_id, None)
    cached = [
        {prefix for g, prefix in content.values() if g == group} for group in range(len(groups))
    ]
    hit = pages.manager.lookup(make_request(prompts[-1], 99))
    assert (hit.end if hit else 0) == slow_hit(groups, cached, prompts[-1], size)
    if hit:
        for group, blocks in enumerate(hit.blocks):
            for i, block_id in enumerate(blocks):
                if block_id != NULL_BLOCK_ID:
                    assert content[block_id] == (group, tuple(prompts[-1][: (i + 1) * size]))
