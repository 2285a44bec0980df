"""Brings together what one HTTP request waits for: its prompts' deltas, its client hanging up, and the next heartbeat.

Knows nothing of formats. Invariant: leaving the `async with` block leaves every engine request, so an answer that
nobody will read is aborted, in whatever state it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from poise.core.output import TokenLogprobs
from poise.engine.client import ChoiceDelta, EngineClient, EngineRequest, RequestDelta
from poise.server.http_errors import ClientGoneError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
PassOn = Callable[[RequestDelta], bool]


class Arrivals:
    """Runs the engine requests and hands out what has arrived since the last call, joined per choice.

    While the reader is slow, deltas collect here; joined, they take no more room than the answer itself.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[EngineRequest],
        receive: Receive,
        heartbeat_seconds: float,
    ) -> None:
        self._client = client
        self._requests = requests
        self._receive = receive
        self._heartbeat_seconds = heartbeat_seconds
        self._pending: list[tuple[int, RequestDelta]] = []
        self._wakeup = asyncio.Event()
        self._waiting = False  # `take` stands at `_wakeup`: all that came before was taken
        self._pass_on: PassOn | None = None
        self._num_running = len(requests)
        self._failure: Exception | None = None
        self._client_gone = False
        self._heartbeat_due = False
        self._leave: list[Callable[[], None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last_taken = self._loop.time()

    async def __aenter__(self) -> Arrivals:
        self._watch = asyncio.create_task(self._watch_client())
        try:
            for index, request in enumerate(self._requests):
                self._leave.append(self._client.submit(request, partial(self._deliver, index)))
        except Exception as error:  # told by `take`, like what the engine raises later
            self._failure = error
        self._timer = self._loop.call_later(self._heartbeat_seconds, self._beat)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for leave in self._leave:
            leave()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def take(self) -> list[tuple[int, RequestDelta]] | None:
        """New deltas as (prompt index, delta), in order; [] when a heartbeat is due; None after the last.

        Raises ClientGoneError, or the first error that the engine raised.
        """
        while True:
            if self._client_gone:
                raise ClientGoneError
            if self._pending:
                arrived, self._pending = self._pending, []
                self._last_taken = self._loop.time()
                return arrived if len(arrived) == 1 else _joined(arrived)
            if self._failure is not None:
                raise self._failure
            if self._num_running == 0:
                return None
            if self._heartbeat_due:
                self._heartbeat_due = False
                self._last_taken = self._loop.time()
                return []
            self._wakeup.clear()
            self._waiting = True
            try:
                await self._wakeup.wait()
            finally:
                self._waiting = False

    def pass_on(self, function: PassOn) -> None:
        """From now on `function` may have a delta at once, without waking whoever takes; where it returns False, `take` has it.

        It gets deltas of a request's only prompt, in order with what is taken, but for the last one.
        """
        if len(self._requests) == 1:
            self._pass_on = function

    def _deliver(self, index: int, output: RequestDelta | Exception) -> None:
        if isinstance(output, Exception):
            self._failure = self._failure or output
        elif self._failure is not None or self._was_passed_on(output):
            return  # nothing more is said behind a failure
        else:
            self._pending.append((index, output))
            self._num_running -= output.stats is not None
        self._wakeup.set()

    def _was_passed_on(self, delta: RequestDelta) -> bool:
        in_order = self._waiting and not self._wakeup.is_set()
        if self._pass_on is None or not in_order or delta.stats is not None:
            return False
        try:
            if not self._pass_on(delta):
                return False
        except Exception as error:  # one answer's; the caller has deltas for others
            self._failure = self._failure or error
            self._wakeup.set()
        self._last_taken = self._loop.time()
        return True

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        self._wakeup.set()

    def _beat(self) -> None:
        idle = self._loop.time() - self._last_taken
        wait = self._heartbeat_seconds - idle
        if wait <= 0:
            self._heartbeat_due = True
            self._wakeup.set()
            wait = self._heartbeat_seconds
        self._timer = self._loop.call_later(wait, self._beat)


def _joined(arrived: list[tuple[int, RequestDelta]]) -> list[tuple[int, RequestDelta]]:
    """Joins deltas of the same prompt and choice; the order of first appearance stays."""
    by_prompt: dict[int, list[RequestDelta]] = {}
    for index, delta in arrived:
        by_prompt.setdefault(index, []).append(delta)
    return [
        (index, deltas[0] if len(deltas) == 1 else join_deltas(deltas))
        for index, deltas in by_prompt.items()
    ]


def join_deltas(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """One delta that says what `deltas`, consecutive ones of a request, said."""
    by_choice: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        for choice in delta.choices:
            by_choice.setdefault(choice.index, []).append(choice)
    prompt_logprobs = next(
        (delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None
    )
    return RequestDelta(
        request_id=deltas[0].request_id,
        choices=[join_choice(choices) for choices in by_choice.values()],
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
        prompt_logprobs=prompt_logprobs,
        stats=deltas[-1].stats,
    )


def join_choice(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    """One delta that says what `deltas`, consecutive ones of a choice, said."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs: list[TokenLogprobs] | None = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return ChoiceDelta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=logprobs,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )
