"""A prefix cache computes each edge of the prompts' radix tree once: cold one by one, cold all at once, and warm."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_harness import Harness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poise.core.request import RequestOwner


def radix_edges(prompts: Sequence[Sequence[int]], size: int) -> int:
    """Prompt tokens to compute, by analysis: each distinct block (with all before it) once, and of each prompt
    what is left after its last whole block. No prompt ends at a block's edge.
    """
    assert all(len(prompt) % size for prompt in prompts)
    edges = {
        tuple(prompt[: end]) for prompt in prompts for end in range(size, len(prompt), size)
    }  # fmt: skip
    return size * len(edges) + sum(len(prompt) % size for prompt in prompts)


def computed(harness: Harness) -> int:
    return harness.scheduler.stats().counters.num_computed_prompt_tokens


def rows(prompts: Sequence[Sequence[int]], **options: int) -> dict[str, int]:
    """Computed prompt tokens of each way to send them, by the scheduler's counter."""
    found = {}
    harness = Harness(**options)  # type: ignore[arg-type]
    for prompt in prompts:
        harness.add(prompt, 1)
        harness.drain()
    found["cold, one by one"] = computed(harness)
    for prompt in prompts:
        harness.add(prompt, 1)
        harness.drain()
    found["warm"] = computed(harness) - found["cold, one by one"]
    harness = Harness(**options)  # type: ignore[arg-type]
    for prompt in prompts:
        harness.add(prompt, 1)
    harness.drain()
    found["cold, all at once"] = computed(harness)
    return found


def test_the_reference_workload_of_a_shared_prefix() -> None:
    """W4: 32 prompts of 1,088 tokens, the first 1,024 of which are the same, 16 at a time."""
    prompts = [[1] * 1024 + [2 + number] * 64 for number in range(32)]
    found = rows(
        prompts, num_blocks=256, block_size=16, max_num_seqs=16, max_num_batched_tokens=512
    )
    # 1,088 of the first one and 64 of each other; warm, all but the last whole block before the end
    assert found == {
        "cold, one by one": 1088 + 31 * 64,
        "cold, all at once": 1088 + 31 * 64,
        "warm": 32 * 16,
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(
        st.lists(st.integers(0, 1), min_size=1, max_size=30).filter(lambda tokens: len(tokens) % 4),
        min_size=1,
        max_size=8,
    ),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(1, 40),
)
def test_any_tree_of_prompts_costs_its_radix_edges(
    prompts: list[list[int]], max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    found = rows(
        prompts,
        num_blocks=128,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    edges = radix_edges(prompts, 4)
    assert found["cold, one by one"] == edges
    assert found["cold, all at once"] == edges
    assert found["warm"] == sum(len(prompt) % 4 for prompt in prompts)


@pytest.mark.parametrize(("num_public", "shared"), [(0, 0), (7, 4), (8, 8), (100, 28)])
def test_tenants_share_no_edge_but_those_of_a_public_prefix(num_public: int, shared: int) -> None:
    prompt = list(range(29))
    harness = Harness(num_blocks=512, block_size=4)
    counts = []
    for tenant in ("a", "b", "a"):
        before = computed(harness)
        owner = RequestOwner(
            tenant, cache_salt=tenant.encode(), num_public_tokens=min(num_public, 29)
        )
        harness.add(prompt, 1, owner=owner)
        harness.drain()
        counts.append(computed(harness) - before)
    assert counts == [29, 29 - shared, 1]
