from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from engine_harness import TypingExecutor, assert_idle, join, make_engine, request, run

from poise.core.output import ModelRunnerOutput, SchedulerOutput
from poise.engine import core_loop
from poise.engine.async_client import InProcessClient
from poise.engine.client import EngineRequest, RequestDelta, deltas_of
from poise.engine.llm_engine import LLMEngine
from poise.errors import EngineDeadError, InvalidRequestError

T = TypeVar("T")


def with_client(
    engine: LLMEngine, body: Callable[[InProcessClient], Awaitable[T]], *, close: bool = True
) -> T:
    async def main() -> T:
        client = InProcessClient.from_engine(engine)
        assert client.status().ready
        assert client.info is engine.info
        try:
            return await body(client)
        finally:
            if close:
                await client.close()

    return asyncio.run(main())


async def collect(client: InProcessClient, item: EngineRequest) -> list[RequestDelta]:
    return [delta async for delta in deltas_of(client, item)]


class GatedExecutor(TypingExecutor):
    """Runs a step only when it is let."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(lambda prompt: answer)
        self.gate = threading.Semaphore(0)
        self.started = threading.Event()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.started.set()
        self.gate.acquire()
        return super().execute(output)


def test_streams_equal_the_synchronous_engine() -> None:
    items = [
        request(f"prompt {i}", "same id", max_tokens=4 + i, seed=i, n=1 + i % 2, logprobs=0)
        for i in range(20)
    ]
    expected = run(make_engine(), *items)

    async def body(client: InProcessClient) -> list[list[RequestDelta]]:
        return await asyncio.gather(*(collect(client, item) for item in items))

    engine = make_engine()
    results = with_client(engine, body)
    assert [join(deltas) for deltas in results] == expected
    assert all(delta.request_id == "same id" for deltas in results for delta in deltas)
    assert_idle(engine)


def test_a_refused_request_raises_before_the_first_delta_and_the_next_one_works() -> None:
    async def body(client: InProcessClient) -> None:
        with pytest.raises(InvalidRequestError, match="999") as caught:
            await collect(client, request(b"x" * 999))
        assert caught.value.param == "prompt"
        assert (await collect(client, request(max_tokens=2)))[-1].stats is not None
        assert client.status().ready

    with_client(make_engine(), body)


def test_one_thousand_random_aborts_leave_the_pool_as_it_was() -> None:
    chance = random.Random(5)
    engine = make_engine(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=16)
    left_early = 0

    async def leave_early(client: InProcessClient, number: int) -> None:
        nonlocal left_early
        num_deltas = chance.choice([0, 0, 1, 2, 3, 5, 8, 100])
        prompt = f"{number % 7} shared beginning of a prompt {number % 3}"[: chance.randint(1, 40)]
        stream = deltas_of(
            client,
            request(prompt, n=chance.choice([1, 1, 1, 3]), max_tokens=12, ignore_eos=True, seed=1),
        )
        if num_deltas == 0:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            left_early += 1
            return
        async for delta in stream:
            num_deltas -= 1
            if num_deltas == 0:
                left_early += delta.stats is None
                break
        await stream.aclose()  # type: ignore[attr-defined]

    async def body(client: InProcessClient) -> None:
        for start in range(0, 1000, 25):
            await asyncio.gather(*(leave_early(client, start + i) for i in range(25)))
        assert client.num_unfinished_requests == 0
        deltas = await collect(client, request(max_tokens=3, ignore_eos=True))
        assert join(deltas)[0].finish_reason == "length"

    with_client(engine, body)
    assert left_early > 500
    assert_idle(engine)


def test_leaving_a_stream_frees_its_blocks_within_two_steps() -> None:
    executor = GatedExecutor(b"x" * 100)
    engine = make_engine(executor)

    async def body(client: InProcessClient) -> None:
        other = asyncio.ensure_future(collect(client, request("other", max_tokens=50)))
        stream = deltas_of(client, request("a prompt", max_tokens=90))
        executor.gate.release(3)
        await anext(stream)
        while executor.gate._value:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        await stream.aclose()  # type: ignore[attr-defined]
        steps = engine.metrics.num_steps
        executor.gate.release(2)
        while engine.metrics.num_steps < steps + 2:
            await asyncio.sleep(0.001)
        assert engine.metrics.finished["abort"] == 1
        assert engine.metrics.num_running == 1
        executor.gate.release(1000)
        await other

    with_client(engine, body)
    assert_idle(engine)


def test_loading_then_ready_then_draining_then_closed() -> None:
    may_load = threading.Event()

    def factory() -> LLMEngine:
        may_load.wait()
        return make_engine(TypingExecutor(lambda prompt: b"abc"))

    async def main() -> None:
        client = InProcessClient(factory)
        assert (client.status().alive, client.status().reason) == (True, "loading")
        assert client.render_metrics() == b""
        with pytest.raises(EngineDeadError, match="loading"):
            client.info  # noqa: B018
        with pytest.raises(EngineDeadError, match="loading"):
            await collect(client, request())
        may_load.set()
        assert (await client.wait_ready()).model == "bytes"
        assert client.status().ready
        assert b"vllm:num_requests_running" in client.render_metrics()
        running = asyncio.ensure_future(collect(client, request(max_tokens=9)))
        await asyncio.sleep(0)
        assert await client.drain(10.0)
        assert (await running)[-1].stats is not None
        assert client.status().reason == "draining"
        assert not client.status().ready
        with pytest.raises(EngineDeadError, match="draining"):
            await collect(client, request())
        await client.close()
        await client.close()
        assert not client.status().alive

    asyncio.run(main())


def test_a_model_that_can_not_be_loaded_is_a_dead_engine_with_the_reason() -> None:
    def factory() -> LLMEngine:
        raise ValueError("no such model")

    async def main() -> None:
        client = InProcessClient(factory)
        with pytest.raises(EngineDeadError, match="no such model"):
            await client.wait_ready()
        assert client.status().reason == "engine failed: ValueError: no such model"
        with pytest.raises(EngineDeadError, match="no such model"):
            await collect(client, request())
        await client.close()

    asyncio.run(main())


def test_drain_gives_up_after_its_timeout_and_close_aborts() -> None:
    executor = GatedExecutor(b"x" * 100)
    engine = make_engine(executor)

    async def body(client: InProcessClient) -> None:
        running = asyncio.ensure_future(collect(client, request(max_tokens=50)))
        await asyncio.sleep(0)
        assert not await client.drain(0.01)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        executor.gate.release(5)
        await closing
        assert join(await running)[0].finish_reason == "abort"

    with_client(engine, body)
    assert_idle(engine)


def test_engine_death_reaches_running_waiting_and_later_requests() -> None:
    executor = TypingExecutor(lambda prompt: b"abc")

    def fail(output: SchedulerOutput) -> None:
        raise RuntimeError("boom")

    executor.fail = fail

    async def body(client: InProcessClient) -> None:
        results = await asyncio.gather(
            *(collect(client, request(f"{i}", max_tokens=9)) for i in range(30)),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                assert isinstance(result, EngineDeadError)
            else:
                assert join(result)[0].finish_reason == "error"
        status = client.status()
        assert (status.alive, status.ready) == (False, False)
        assert status.reason is not None
        assert "boom" in status.reason
        with pytest.raises(EngineDeadError, match="boom"):
            await collect(client, request())

    with_client(make_engine(executor, max_num_seqs=4), body)


def test_a_fault_outside_a_step_is_told_to_everyone() -> None:
    engine = make_engine()

    def broken(*arguments: object) -> None:
        raise RuntimeError("broken gauge")

    engine._update_gauges = broken  # type: ignore[method-assign]

    async def body(client: InProcessClient) -> None:
        results = await asyncio.gather(
            *(collect(client, request()) for _ in range(5)), return_exceptions=True
        )
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert "broken gauge" in str(client.status().reason)

    with_client(engine, body)


def test_requests_that_race_with_close_are_all_answered() -> None:
    async def main() -> None:
        for turn in range(30):
            client = InProcessClient.from_engine(make_engine())
            tasks = [
                asyncio.ensure_future(collect(client, request(f"{i}", max_tokens=30)))
                for i in range(8)
            ]
            await asyncio.sleep(turn / 10_000)
            closing = asyncio.ensure_future(client.close())
            await asyncio.sleep(0)
            tasks += [asyncio.ensure_future(collect(client, request()))]
            async with asyncio.timeout(20):
                results = await asyncio.gather(*tasks, return_exceptions=True)
            await closing
            for result in results:
                assert isinstance(result, (EngineDeadError, list))
                if isinstance(result, list):
                    assert result[-1].stats is not None

    asyncio.run(main())


def test_an_idle_engine_sleeps() -> None:
    engine = make_engine()

    async def body(client: InProcessClient) -> None:
        await collect(client, request(max_tokens=2))
        steps = client.num_steps
        assert steps > 0
        await asyncio.sleep(0.02)
        assert client.num_steps == steps

    with_client(engine, body)


def test_an_idle_engine_checks_its_books_once_and_stops_if_they_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_loop, "IDLE_SECONDS", 0.01)
    engine = make_engine()
    check, num_checks = engine.check_invariants, 0

    def counted() -> None:
        nonlocal num_checks
        num_checks += 1
        check()

    engine.check_invariants = counted  # type: ignore[method-assign]

    async def body(client: InProcessClient) -> None:
        for turn in (1, 2):
            await collect(client, request(max_tokens=2))
            while num_checks < turn:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert num_checks == 2
        assert client.status().ready
        engine._scheduler._kv_cache.pool._blank.pop()  # a block is lost
        await collect(client, request(max_tokens=2))
        while client.status().alive:
            await asyncio.sleep(0.001)
        assert "an invariant is broken: AssertionError: block" in str(client.status().reason)
        with pytest.raises(EngineDeadError, match="invariant"):
            await collect(client, request())

    with_client(engine, body)


def test_idle_moments_are_used_and_keep_nobody_waiting() -> None:
    engine = make_engine()
    num_moments = 0

    def moment() -> bool:
        nonlocal num_moments
        num_moments += 1
        return True  # there is always more to do

    engine.use_idle_moment = moment  # type: ignore[method-assign]

    async def body(client: InProcessClient) -> None:
        for _ in range(3):
            before = num_moments
            await collect(client, request(max_tokens=2))
            while num_moments == before:
                await asyncio.sleep(0.001)

    with_client(engine, body)


def test_an_event_loop_that_goes_away_closes_the_engine() -> None:
    executor = GatedExecutor(b"x" * 100)
    engine = make_engine(executor)

    async def body(client: InProcessClient) -> None:
        stream = deltas_of(client, request(max_tokens=90))
        executor.gate.release(1)
        await anext(stream)

    with_client(engine, body, close=False)
    executor.gate.release(1000)
    for thread in threading.enumerate():
        if thread.name == "poise-engine":
            thread.join(10)
            assert not thread.is_alive()
    assert engine.failure == "closed"
