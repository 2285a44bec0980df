"""Joined deltas say what the deltas said, in any grouping, and none overtakes another."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.core.output import TokenLogprobs
from poise.engine.client import ChoiceDelta, RequestDelta, RequestStats
from poise.server.arrivals import Arrivals, join_deltas
from poise.server.http_protocol import PARTS, Parts

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


class FakeClient:
    deliver: Any

    def submit(self, request: object, deliver: Any) -> Any:
        self.deliver = deliver
        return lambda: None


def test_a_delta_is_passed_on_only_behind_all_before_it() -> None:
    """The first can't be written yet; by the second it could, but the first is still to be taken."""
    deltas = [RequestDelta("r", [ChoiceDelta(0, text, (1,))]) for text in "abcd"]
    passed: list[RequestDelta] = []

    async def run() -> list[str]:
        client = FakeClient()
        never: Any = asyncio.Event().wait
        async with Arrivals(client, [None], never, 60.0) as arrivals:  # type: ignore[arg-type, list-item]
            can_write = False

            def pass_on(delta: RequestDelta) -> bool:
                if can_write:
                    passed.append(delta)
                return can_write

            arrivals.pass_on(pass_on)
            taking = asyncio.ensure_future(arrivals.take())
            await asyncio.sleep(0)
            client.deliver(deltas[0])
            can_write = True
            client.deliver(deltas[1])
            taken = await taking
            assert taken is not None
            client.deliver(deltas[2])  # nobody waits: whoever took may still be writing
            [(_, third)] = await arrivals.take() or []
            taking = asyncio.ensure_future(arrivals.take())
            await asyncio.sleep(0)
            client.deliver(deltas[3])
            taking.cancel()
            return [delta.choices[0].text for _, delta in taken] + [third.choices[0].text]

    assert asyncio.run(run()) == ["ab", "c"]
    assert passed == [deltas[3]]


def test_nothing_is_said_behind_a_delta_that_could_not_be_passed_on() -> None:
    async def run() -> None:
        client = FakeClient()
        never: Any = asyncio.Event().wait
        async with Arrivals(client, [None], never, 60.0) as arrivals:  # type: ignore[arg-type, list-item]
            arrivals.pass_on(lambda delta: 1 / 0 > 0)
            taking = asyncio.ensure_future(arrivals.take())
            await asyncio.sleep(0)
            for text in "ab":
                client.deliver(RequestDelta("r", [ChoiceDelta(0, text, (1,))]))
            with pytest.raises(ZeroDivisionError):
                await taking

    asyncio.run(run())


def test_parts_hold_no_cycle_alive() -> None:
    """What a connection's cycle of request and response holds is let go with it, without the garbage collector."""

    class Cycle:
        scope: Any

    cycle: Any = Cycle()
    cycle.scope = {"extensions": {PARTS: Parts(cycle)}}
    scope = weakref.ref(cycle)
    gc.disable()
    try:
        del cycle
        assert scope() is None
    finally:
        gc.enable()
