"""The engine in this process, seen from an event loop: one asynchronous stream of deltas per
request.

Owns the streams; the engine itself lives in the thread of `core_loop`. Request ids are the caller's
and may repeat: inside, requests go by a counter. Invariant: a stream ends with a final delta or an
error, and leaving it early aborts the request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic_ns, thread_time_ns
from typing import Any

from poise.core.output import TokenLogprobs
from poise.core.tenant import TenantTable
from poise.engine.client import (
    ChoiceDelta,
    EngineInfo,
    EngineRequest,
    EngineStatus,
    ProfileReport,
    RequestDelta,
)
from poise.engine.core_loop import Delivery, EngineLoop
from poise.engine.llm_engine import LLMEngine
from poise.engine.profile import profile_report, trace_events
from poise.errors import EngineDeadError, PoiseError

MAX_PENDING_DELTAS = 8


class InProcessClient:
    """EngineClient over an LLMEngine in a thread.

    `source` is an engine, or what builds one in that thread: then the client exists (status
    "loading") while the model loads. Must be made on a running event loop; all methods belong to
    that loop's thread.
    """

    def __init__(self, source: LLMEngine | Callable[[], LLMEngine]) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._streams: dict[int, _Stream] = {}  # those still to be fed
        self._keys_by_id: dict[str, set[int]] = {}
        self._num_readers = 0
        self._keys = itertools.count()
        self._draining = False
        self._http_began = 0  # CPU ns of the event loop's thread when a profile began
        self._loaded = asyncio.Event()
        self._stopped = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = EngineLoop(
            source,
            deliver=lambda outputs: self._call_soon(self._dispatch, outputs),
            on_loaded=lambda: self._call_soon(self._loaded.set),
            on_stopped=lambda reason: self._call_soon(self._fail_all, reason),
        )
        self._loop.start()

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> InProcessClient:
        """A client of an engine that is already loaded: ready at once."""
        return cls(engine)

    async def wait_ready(self) -> EngineInfo:
        """Waits for the model to load; EngineDeadError with the reason if that fails."""
        await self._loaded.wait()
        return self.info

    @property
    def info(self) -> EngineInfo:
        engine = self._loop.engine
        if engine is None:
            raise EngineDeadError(self.status().reason or "the model is still loading")
        return engine.info

    @property
    def engine(self) -> LLMEngine | None:
        """The engine once loaded. Another thread is stepping it: read only its info, tokenizer and
        metrics.
        """
        return self._loop.engine

    @property
    def num_steps(self) -> int:
        """Heartbeat: rises with every step; standing still while requests run means a hung step."""
        engine = self._loop.engine
        return 0 if engine is None else engine.metrics.num_steps

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose last delta was not read yet."""
        return self._num_readers

    def render_metrics(self) -> bytes:
        """The engine's metrics in the Prometheus text format; empty while loading."""
        engine = self._loop.engine
        return b"" if engine is None else engine.metrics.render()

    async def timeline(self, request_id: str) -> list[dict[str, Any]]:
        """The events of a request that runs or ended lately; empty for an unknown id."""
        return await asyncio.wrap_future(
            self._loop.call(lambda engine: engine.timeline(request_id))
        )

    async def set_tenants(self, tenants: TenantTable) -> None:
        """Replaces what the scheduler and the cache know of tenants."""
        await asyncio.wrap_future(self._loop.call(lambda engine: engine.set_tenants(tenants)))

    async def start_profile(self) -> None:
        """Begins to time steps, afresh if it does so already."""
        await asyncio.wrap_future(self._loop.call(LLMEngine.start_profile))
        self._http_began = thread_time_ns()

    async def stop_profile(self) -> ProfileReport:
        """Ends profiling and says where the time went. Raises InvalidRequestError if none was running."""
        http = thread_time_ns() - self._http_began
        engine, executor = await asyncio.wrap_future(self._loop.call(LLMEngine.stop_profile))
        report = profile_report(engine, executor, monotonic_ns(), http)
        return ProfileReport(report, trace_events(engine, executor))

    def status(self) -> EngineStatus:
        status = self._loop.status()
        if status.ready and self._draining:
            return EngineStatus(alive=True, ready=False, reason="draining")
        return status

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
        if self._draining:
            raise EngineDeadError("the engine is draining and takes no new requests")
        key = next(self._keys)
        self._loop.submit(key, request)
        stream = self._streams[key] = _Stream()
        self._keys_by_id.setdefault(request.request_id, set()).add(key)
        self._num_readers += 1
        self._idle.clear()
        try:
            while not stream.finished:
                yield await stream.next()
        finally:
            if self._streams.pop(key, None) is not None:
                self._loop.abort(key)
            self._forget_id(request.request_id, key)
            self._num_readers -= 1
            if self._num_readers == 0:
                self._idle.set()

    def _forget_id(self, request_id: str, key: int) -> None:
        keys = self._keys_by_id[request_id]
        keys.discard(key)
        if not keys:
            del self._keys_by_id[request_id]

    def cancel(self, request_id: str) -> None:
        """Ends a request of that id in any state; its stream ends with finish reason abort."""
        for key in self._keys_by_id.get(request_id, ()):
            self._loop.abort(key)

    async def drain(self, timeout_seconds: float | None = None) -> bool:
        """Refuses new requests and waits for the running ones; False if some still run after the
        timeout.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self._draining = True
        self._loop.request_close()
        await self._stopped.wait()
        self._loop.join()

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        """From the engine's thread to the event loop's; an event loop that has gone closes the
        engine.
        """
        try:
            self._event_loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self._loop.request_close()

    def _dispatch(self, outputs: Sequence[Delivery]) -> None:
        for key, output in outputs:
            stream = self._streams.get(key)
            if stream is None:
                continue  # left early: its abort is on the way
            if isinstance(output, PoiseError):
                stream.fail(output)
                del self._streams[key]
            else:
                stream.put(output)
                if output.stats is not None:
                    del self._streams[key]

    def _fail_all(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.fail(EngineDeadError(reason))
        self._streams.clear()
        self._loaded.set()
        self._stopped.set()


class _Stream:
    """What waits for one reader: a few deltas as they came, and past those one merged delta."""

    def __init__(self) -> None:
        self._deltas: deque[RequestDelta] = deque()
        self._merged: _MergedDelta | None = None
        self._error: PoiseError | None = None
        self._wakeup = asyncio.Event()
        self.finished = False

    def put(self, delta: RequestDelta) -> None:
        if self._merged is not None:
            self._merged.append(delta)
        elif len(self._deltas) >= MAX_PENDING_DELTAS:
            self._merged = _MergedDelta(delta)
        else:
            self._deltas.append(delta)
        self._wakeup.set()

    def fail(self, error: PoiseError) -> None:
        self._error = error
        self._wakeup.set()

    async def next(self) -> RequestDelta:
        while True:
            delta = self._take()
            if delta is not None:
                self.finished = delta.stats is not None
                return delta
            if self._error is not None:
                raise self._error
            self._wakeup.clear()
            await self._wakeup.wait()

    def _take(self) -> RequestDelta | None:
        if self._deltas:
            return self._deltas.popleft()
        if self._merged is not None:
            merged, self._merged = self._merged, None
            return merged.build()
        return None


class _MergedDelta:
    """Deltas of one request folded into one, in time linear in their tokens."""

    def __init__(self, delta: RequestDelta) -> None:
        self._first = delta
        self._last = delta
        self._choices: dict[int, _MergedChoice] = {}
        self.append(delta)

    def append(self, delta: RequestDelta) -> None:
        self._last = delta
        for choice in delta.choices:
            self._choices.setdefault(choice.index, _MergedChoice()).append(choice)

    def build(self) -> RequestDelta:
        return RequestDelta(
            request_id=self._first.request_id,
            choices=tuple(choice.build() for choice in self._choices.values()),
            num_cached_tokens=self._last.num_cached_tokens,
            prompt_logprobs=self._first.prompt_logprobs,
            stats=self._last.stats,
        )


class _MergedChoice:
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._last: ChoiceDelta | None = None

    def append(self, choice: ChoiceDelta) -> None:
        self._texts.append(choice.text)
        self._token_ids.extend(choice.token_ids)
        if choice.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs.extend(choice.logprobs)
        self._last = choice

    def build(self) -> ChoiceDelta:
        assert self._last is not None, "a merged choice holds at least one delta"
        return ChoiceDelta(
            index=self._last.index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=self._last.finish_reason,
            stop_reason=self._last.stop_reason,
        )
