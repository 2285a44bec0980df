"""The thread that runs an LLMEngine: commands are drained between steps, outputs are handed over
once per step.

Knows nothing of asyncio. Invariant: every submitted key is answered, by deltas up to a final one,
by an error, or by `on_stopped`, which is called exactly once and last.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from poise.engine.client import EngineRequest, EngineStatus, RequestDelta
from poise.engine.llm_engine import LLMEngine
from poise.errors import DeadlineError, EngineDeadError, InvalidRequestError, QueueFullError

Delivery = tuple[int, RequestDelta | InvalidRequestError | QueueFullError | DeadlineError]
REFUSALS = (InvalidRequestError, QueueFullError, DeadlineError)
CLOSED = "the engine is closed"

IDLE_SECONDS = 2.0
"""So long after the last request the engine's books are checked once: some ten milliseconds that nobody waits for."""

_Command = tuple[int, EngineRequest | None, float]  # key, request (None aborts), arrival time
_T = TypeVar("_T")


class EngineLoop:
    """Runs an engine in a thread of its own; `source` is that engine, or what builds it in that
    thread.

    `deliver`, `on_loaded` and `on_stopped` are called on that thread. The thread sleeps while there
    is nothing to do.
    """

    def __init__(
        self,
        source: LLMEngine | Callable[[], LLMEngine],
        *,
        deliver: Callable[[Sequence[Delivery]], None],
        on_loaded: Callable[[], None],
        on_stopped: Callable[[str], None],
    ) -> None:
        self._source = source
        self._deliver = deliver
        self._on_loaded = on_loaded
        self._on_stopped = on_stopped
        self._condition = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._num_submitted = 0  # requests that the engine has not taken or refused yet
        self._calls: deque[tuple[Callable[[LLMEngine], None], Future[Any]]] = deque()
        self._closing = False
        self._stop_reason: str | None = None
        self.engine = source if isinstance(source, LLMEngine) else None
        self._thread = threading.Thread(target=self._run, name="poise-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def status(self) -> EngineStatus:
        with self._condition:
            reason = self._death()
            if reason is not None:
                return EngineStatus(alive=False, ready=False, reason=reason)
            if self.engine is None:
                return EngineStatus(alive=True, ready=False, reason="loading")
            return EngineStatus(alive=True, ready=True)

    def submit(self, key: int, request: EngineRequest) -> None:
        """Queues a request under a key that was never used before; EngineDeadError if it can't be
        served, QueueFullError if too much is waiting already: then nobody waits for a step to be told.
        """
        with self._condition:
            reason = self._death()
            if reason is not None:
                raise EngineDeadError(reason)
            if self._closing:
                raise EngineDeadError("the engine is closing")
            if self.engine is None:
                raise EngineDeadError("the model is still loading")
            self.engine.refuse_early(request, self._num_submitted)
            self._num_submitted += 1
            self._commands.append((key, request, self.engine.clock.now()))
            self._condition.notify()

    def abort(self, key: int) -> None:
        """Ends a request before the next step; unknown and finished keys are no matter."""
        with self._condition:
            if self._stop_reason is None:
                self._commands.append((key, None, 0.0))
                self._condition.notify()

    def call(self, function: Callable[[LLMEngine], _T]) -> Future[_T]:
        """Runs a function on the engine between two steps; the future gets what it returns or raises."""
        future: Future[_T] = Future()

        def run(engine: LLMEngine) -> None:
            try:
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)

        with self._condition:
            reason = self._death()
            if reason is not None:
                raise EngineDeadError(reason)
            self._calls.append((run, future))
            self._condition.notify()
        return future

    def request_close(self) -> None:
        """Lets the thread abort what runs and end; returns at once."""
        with self._condition:
            self._closing = True
            self._condition.notify()

    def join(self) -> None:
        self._thread.join()

    def _death(self) -> str | None:
        """Why nothing is served any more; a failing engine is dead before its thread has ended."""
        if (
            self._stop_reason is None
            and self.engine is not None
            and self.engine.failure is not None
        ):
            return CLOSED if self._closing else f"engine failed: {self.engine.failure}"
        return self._stop_reason

    def _run(self) -> None:
        reason = CLOSED
        try:
            source = self._source
            engine = source if isinstance(source, LLMEngine) else source()
            with self._condition:
                self.engine = engine
            self._on_loaded()
            try:
                self._serve(engine)
                reason = self._death() or CLOSED
            finally:
                engine.close()
        except BaseException as error:  # nothing may leave a waiting request without an answer
            reason = f"engine failed: {type(error).__name__}: {error}"
        with self._condition:
            self._stop_reason = reason
            self._commands.clear()  # their keys are answered by on_stopped
            calls = list(self._calls)
            self._calls.clear()
        for _, future in calls:
            future.set_exception(EngineDeadError(reason))
        self._on_stopped(reason)

    def _has_work(self, engine: LLMEngine) -> bool:
        return bool(
            self._commands or self._calls or self._closing or engine.has_unfinished_requests()
        )

    def _serve(self, engine: LLMEngine) -> None:
        is_checked = True  # nothing has run since the engine's books were checked
        while engine.failure is None:
            is_idle = False
            while not self._has_work(engine) and engine.use_idle_moment():
                pass
            with self._condition:
                while not (self._has_work(engine) or is_idle):
                    is_idle = not self._condition.wait(None if is_checked else IDLE_SECONDS)
                is_idle = is_idle and not self._has_work(engine)
                commands = list(self._commands)
                self._commands.clear()
                calls = list(self._calls)
                self._calls.clear()
                closing = self._closing
            is_checked = is_idle
            if is_idle:
                engine.check_invariants()
                continue
            for run, _ in calls:
                run(engine)
            outputs: list[Delivery] = []
            for key, request, arrival_time in commands:
                if request is None:
                    engine.abort(key)
                else:
                    try:
                        engine.add_request(key, request, arrival_time)
                    except REFUSALS as error:
                        outputs.append((key, error))
                    with self._condition:
                        self._num_submitted -= 1
            if outputs:  # who was refused need not wait for a step to be told
                self._deliver(outputs)
                outputs = []
            if closing:
                engine.abort_all()
            outputs.extend(engine.step())
            if outputs:
                self._deliver(outputs)
            if closing:
                return
