"""The engine in this process, seen from an event loop: deltas are handed to each request's reader.

Knows the readers; the engine itself lives in the thread of `core_loop`. Request ids are the caller's
and may repeat: inside, requests go by a counter. Invariant: a reader is told a final delta or an
error last, unless it left before, which aborts its request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns, thread_time_ns
from typing import Any

from poise.core.tenant import TenantTable
from poise.engine.client import Deliver, EngineInfo, EngineRequest, EngineStatus, ProfileReport
from poise.engine.core_loop import Delivery, EngineLoop
from poise.engine.llm_engine import LLMEngine
from poise.engine.profile import profile_report, trace_events
from poise.errors import EngineDeadError, PoiseError


class InProcessClient:
    """EngineClient over an LLMEngine in a thread.

    `source` is an engine, or what builds one in that thread: then the client exists (status
    "loading") while the model loads. Must be made on a running event loop; all methods belong to
    that loop's thread.
    """

    def __init__(self, source: LLMEngine | Callable[[], LLMEngine]) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._readers: dict[int, Deliver] = {}  # those still to be told something
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
        """Requests that their reader has not left yet."""
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

    def submit(self, request: EngineRequest, deliver: Deliver) -> Callable[[], None]:
        if self._draining:
            raise EngineDeadError("the engine is draining and takes no new requests")
        key = next(self._keys)
        self._loop.submit(key, request)
        self._readers[key] = deliver
        self._keys_by_id.setdefault(request.request_id, set()).add(key)
        self._num_readers += 1
        self._idle.clear()
        return partial(self._leave, key, request.request_id)

    def _leave(self, key: int, request_id: str) -> None:
        if self._readers.pop(key, None) is not None:
            self._loop.abort(key)
        self._forget_id(request_id, key)
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
            deliver = self._readers.get(key)
            if deliver is None:
                continue  # left early: its abort is on the way
            if isinstance(output, PoiseError) or output.stats is not None:
                del self._readers[key]
            deliver(output)

    def _fail_all(self, reason: str) -> None:
        readers = tuple(self._readers.values())
        self._readers.clear()
        for deliver in readers:
            deliver(EngineDeadError(reason))
        self._loaded.set()
        self._stopped.set()
