"""Joined deltas say what the deltas said, in any grouping."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from poise.core.output import TokenLogprobs
from poise.engine.client import ChoiceDelta, RequestDelta, RequestStats
from poise.server.arrivals import join_deltas

STATS = RequestStats(1, 0, 1, 0.0, None, 0.0)


@given(
    steps=st.lists(
        st.dictionaries(st.integers(0, 2), st.text(max_size=3), min_size=1, max_size=3),
        min_size=1,
        max_size=8,
    ),
    cuts=st.sets(st.integers(1, 7)),
    with_logprobs=st.booleans(),
)
def test_joined_deltas_say_the_same(
    steps: list[dict[int, str]], cuts: set[int], with_logprobs: bool
) -> None:
    last_step = {index: at for at, step in enumerate(steps) for index in step}
    deltas = []
    for at, step in enumerate(steps):
        choices = [
            ChoiceDelta(
                index,
                text,
                (at, index),
                [TokenLogprobs(at, -1.0, 1)] if with_logprobs else None,
                "stop" if last_step[index] == at else None,
                at if last_step[index] == at else None,
            )
            for index, text in step.items()
        ]
        first = [None] if at == 0 else None
        stats = STATS if at == len(steps) - 1 else None
        deltas.append(RequestDelta("r", choices, at, first, stats))
    bounds = [0, *sorted(cut for cut in cuts if cut < len(deltas)), len(deltas)]
    groups = [deltas[low:high] for low, high in itertools.pairwise(bounds)]
    joined = [join_deltas(group) for group in groups]
    for index in last_step:
        before = [c for delta in deltas for c in delta.choices if c.index == index]
        after = [c for delta in joined for c in delta.choices if c.index == index]
        assert "".join(c.text for c in after) == "".join(c.text for c in before)
        for name in ("token_ids", "logprobs"):
            flat = [x for c in before for x in getattr(c, name) or ()]
            assert [x for c in after for x in getattr(c, name) or ()] == flat
        assert [c.finish_reason for c in after][-1] == "stop"
        assert [c.finish_reason for c in after].count("stop") == 1
        assert after[-1].stop_reason == before[-1].stop_reason
    assert joined[0].prompt_logprobs == [None]
    assert joined[-1].stats is STATS
    assert joined[-1].num_cached_tokens == len(steps) - 1
