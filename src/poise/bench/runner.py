"""Runs a schedule against a server: dispatch, heartbeat, readings of /metrics, and the record made of it all.

Owns the clock's zero and the only event loop. Invariants: the n-th request is sent at its own absolute instant, whatever became
of the one before; every request of the schedule has a row, sent or not; nothing is retried.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import resource
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from poise.bench.client import LoadClient, ServerError, Target, default_model, encode_body
from poise.bench.gates import GateLimits, Observed, judge
from poise.bench.measure import summarise
from poise.bench.record import ClientOptions, RequestRow, RunRecord, Scrape
from poise.bench.schedule import PlannedRequest, Schedule
from poise.bench.scrape import RawScrape, parse, server_figures
from poise.bench.statistics import PercentileChoice
from poise.bench.windows import full_window, steady_window
from poise.machine import environment_report

HEARTBEAT_S = 0.01
LEAD_S = 0.2  # between the last preparation and the first planned instant
GONE_AFTER = 20  # failed connections in a row
PROGRESS_S = 0.5
WANTED_FILES = 65536
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Progress:
    """What a live summary shows; `figures` hold counts so far."""

    planned: int
    sent: int = 0
    in_flight: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0
    last_ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a schedule is run and judged."""

    client: ClientOptions = field(default_factory=ClientOptions)
    percentiles: PercentileChoice = field(default_factory=PercentileChoice)
    goodput_slos: Mapping[str, float] = field(default_factory=dict)
    limits: GateLimits = field(default_factory=GateLimits)
    continuous_usage: bool = True
    keep_text: bool = False
    scrape_metrics: bool = True
    scrape_interval_s: float = 1.0


@dataclass(slots=True)
class RawRun:
    """Everything seen, before any figure is made of it."""

    rows: list[RequestRow]
    in_flight_s: float
    loop_lags: list[float]
    scrapes: list[Scrape]
    stopped: str | None


class InFlight:
    """Requests in flight and their integral over time, counted apart from the rows. Owns the slots of a limit."""

    def __init__(self, limit: int | None, clock: Callable[[], float]) -> None:
        self.number = 0
        self.area = 0.0
        self._clock = clock
        self._since = 0.0
        self._limited = limit is not None
        self._free = deque([-math.inf] * (limit or 0))  # since when each free slot has been free
        self._waiting: deque[asyncio.Future[float]] = deque()

    async def slot(self, planned: float) -> float:
        """Waits for a slot; returns the instant from which it could be used, at the earliest `planned`."""
        if not self._limited:
            return planned
        if self._free:
            return max(planned, self._free.popleft())
        waiter: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        return max(planned, await waiter)

    def free(self, instant: float) -> None:
        """Hands a slot that was free at `instant` to whoever waits longest."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(instant)
                return
        if self._limited:
            self._free.append(instant)

    def change(self, step: int) -> None:
        now = self._clock()
        self.area += self.number * (now - self._since)
        self._since = now
        self.number += step


class Run:
    """One execution of a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        target: Target,
        settings: RunSettings,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._schedule = schedule
        self._target = target
        self._settings = settings
        self._on_progress = on_progress
        self._zero = 0.0
        self._stopped: str | None = None
        self._fault: BaseException | None = None
        self._stop = asyncio.Event()
        self._failed_connections = 0
        self._bodies = [self._encode(request) for request in schedule.requests]
        self.rows = [self._row(i, request) for i, request in enumerate(schedule.requests)]
        self.progress = Progress(len(self.rows))
        self._in_flight = InFlight(schedule.concurrency, self._now)
        self._loop_lags: list[float] = []
        self._raw_scrapes: list[RawScrape] = []

    def stop(self, reason: str) -> None:
        """Ends the run before its schedule; what was measured stays."""
        self._stopped = self._stopped or reason
        self._stop.set()

    async def execute(self) -> RawRun:
        """Warms up, runs, and returns what was seen; raises ServerError when even the first request fails."""
        settings = self._settings
        async with LoadClient(
            self._target, settings.client, keep_text=settings.keep_text
        ) as client:
            await self._warm_up(client)
            self._zero = client.clock_zero = perf_counter()
            await self._scrape(client, "before")
            with quiet_collector():
                self._zero = client.clock_zero = perf_counter() + LEAD_S
                await self._under_load(client)
            await self._scrape(client, "after")
        scrapes = [parse(raw) for raw in self._raw_scrapes]
        return RawRun(self.rows, self._in_flight.area, self._loop_lags, scrapes, self._stopped)

    async def _under_load(self, client: LoadClient) -> None:
        beside = [
            asyncio.create_task(self._heartbeat()),
            asyncio.create_task(self._scrape_often(client)),
            asyncio.create_task(self._report()),
        ]
        load = asyncio.create_task(self._dispatch(client))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((load, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (load, stop, *beside):
                task.cancel()
            await asyncio.gather(load, stop, *beside, return_exceptions=True)
        if not load.cancelled():
            load.result()  # raises what is a fault of ours, as the next line does
        if self._fault is not None:
            raise self._fault
        self._in_flight.change(0)
        self._tell()

    async def _dispatch(self, client: LoadClient) -> None:
        """Starts each request at its instant, or, in a closed loop, when a slot is free; then waits for the last."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            if self._schedule.is_closed:
                await self._sleep_until(0.0)
            for row in self.rows:
                if self._schedule.is_closed:
                    row.planned = row.ready = await self._in_flight.slot(0.0)
                else:
                    await self._sleep_until(row.planned)
                task = asyncio.create_task(self._one(client, row))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(self._ended)
            while tasks:
                await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for row in self.rows:
                if row.sent is None:
                    row.error = "never sent: the run ended first"
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A request's task raises only through a fault of ours, which must not pass for a slow server."""
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
            self.stop("a fault of poise bench")

    async def _one(self, client: LoadClient, row: RequestRow) -> None:
        if row.ready is None:
            row.ready = await self._in_flight.slot(row.planned)
        progress = self.progress
        progress.sent += 1
        self._in_flight.change(1)
        try:
            await client.send(self._bodies[row.index], row)
        finally:
            self._in_flight.change(-1)
            self._in_flight.free(row.end if row.end is not None else self._now())
        progress.done += 1
        if row.status == "ok":
            progress.output_tokens += row.completion_tokens or 0
            if row.first_token is not None:
                progress.last_ttft_s = row.first_token - row.planned
        else:
            progress.failed += 1
        self._watch(row)

    def _watch(self, row: RequestRow) -> None:
        """A server that no longer takes connections ends the run; its other failures do not."""
        if row.status == "error" and row.http_status is None:
            self._failed_connections += 1
            if self._failed_connections >= GONE_AFTER:
                self.stop(f"the server is gone: {row.error}")
        else:
            self._failed_connections = 0

    async def _warm_up(self, client: LoadClient) -> None:
        """Warm-ups one by one, then, for a warm cache, every prompt once; none of them is measured."""
        client.clock_zero = perf_counter()
        requests = list(self._schedule.warmups)
        if self._settings.client.cache == "warm":
            requests += [
                PlannedRequest(request.prompt, 1, None, request.input_length, True)
                for request in self._schedule.requests
            ]
        for request in requests:
            if not self._stop.is_set():
                await self._unmeasured(client, request)

    async def _unmeasured(self, client: LoadClient, request: PlannedRequest) -> None:
        row = self._row(0, request)
        await client.send(self._encode(request), row)
        if row.status != "ok":
            raise ServerError(f"the warm-up request failed: {row.error}")

    async def _sleep_until(self, instant: float) -> None:
        while (delay := instant - self._now()) > 0:
            await asyncio.sleep(delay)

    async def _heartbeat(self) -> None:
        """Beats at absolute instants; a beat that comes after the next was due counts once, at its full lag."""
        due = self._now() + HEARTBEAT_S
        while True:
            await asyncio.sleep(max(0.0, due - self._now()))
            now = self._now()
            self._loop_lags.append(max(0.0, now - due))
            due = max(due + HEARTBEAT_S, now)

    async def _report(self) -> None:
        while self._on_progress is not None:
            self._tell()
            await asyncio.sleep(PROGRESS_S)

    def _tell(self) -> None:
        if self._on_progress is not None:
            self.progress.elapsed_s = max(0.0, self._now())
            self.progress.in_flight = self._in_flight.number
            self._on_progress(self.progress)

    async def _scrape_often(self, client: LoadClient) -> None:
        while self._settings.scrape_metrics:
            await asyncio.sleep(self._settings.scrape_interval_s)
            await self._scrape(client, "during")

    async def _scrape(self, client: LoadClient, phase: Any) -> None:
        if not self._settings.scrape_metrics:
            return
        try:
            status, text = await client.get("/metrics")
            error = None if status == 200 else f"HTTP {status}"
        except ServerError as failure:
            text, error = b"", str(failure)
        self._raw_scrapes.append(RawScrape(self._now(), phase, text, error))

    def _now(self) -> float:
        return perf_counter() - self._zero

    def _encode(self, request: PlannedRequest) -> bytes:
        return encode_body(
            request,
            self._target.model,
            self._settings.client,
            continuous_usage=self._settings.continuous_usage,
        )

    def _row(self, index: int, request: PlannedRequest) -> RequestRow:
        return RequestRow(
            index,
            request.at or 0.0,
            streamed=self._settings.client.stream,
            input_length=request.input_length,
            expected_output_tokens=request.max_tokens if request.ignore_eos else None,
        )


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection while requests are being timed: one walk over what a load leaves behind takes tens of milliseconds.

    A request leaves no reference cycles, so that its memory is given back without it.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def reach(target: Target) -> Target:
    """The target with its model filled in from /v1/models; ServerError where it can't be reached or names no model."""
    async with LoadClient(target, ClientOptions()) as client:
        model = target.model or default_model(*await client.get("/v1/models"))
    if not model:
        raise ServerError(f"{target.info().base_url}: /v1/models names no model; give --model")
    return replace(target, model=model)


def raise_file_limit() -> None:
    """As many open connections as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def build_record(
    schedule: Schedule,
    target: Target,
    settings: RunSettings,
    raw: RawRun,
    provenance: Mapping[str, Any],
) -> RunRecord:
    """Figures, windows and verdicts of what was seen."""
    begin, end = full_window(raw.rows)
    steady, note = steady_window(raw.rows, is_closed=schedule.is_closed)
    windows = {"full": (begin, end)} | ({"steady": steady} if steady else {})
    observed = Observed(
        raw.rows, end - begin, raw.in_flight_s, raw.loop_lags, raw.scrapes, raw.stopped
    )
    gates = judge(observed, schedule, settings.client.cache, settings.limits)
    summary = {
        name: summarise(raw.rows, *window, settings.percentiles, settings.goodput_slos)
        for name, window in windows.items()
    }
    summary["full"].figures |= server_figures(raw.scrapes)
    return RunRecord(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        server=target.info(),
        schedule=schedule.info(),
        client=settings.client,
        provenance=dict(provenance),
        duration_s=end - begin,
        summary=summary,
        steady_note=note,
        gates=gates,
        valid=not any(gate.verdict == "fail" for gate in gates),
        stopped=raw.stopped,
        goodput_slos=dict(settings.goodput_slos),
        metrics=raw.scrapes,
    )


def provenance() -> dict[str, Any]:
    """The host's facts with what else bears on a measurement: load average, clock, event loop."""
    clock = time.get_clock_info("perf_counter")
    return {
        **environment_report(),
        "load_average": list(os.getloadavg()),
        "clock": clock.implementation,
        "clock_resolution_s": clock.resolution,
    }


async def run_schedule(
    schedule: Schedule,
    target: Target,
    settings: RunSettings,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[RunRecord, list[RequestRow]]:
    """Runs a schedule once and returns its record with the rows; ServerError where it could not begin.

    SIGINT and SIGTERM end the run early: what was measured is returned, marked invalid.
    """
    raise_file_limit()
    facts = provenance()
    run = Run(schedule, target, settings, on_progress)
    with signals_stop(run):
        raw = await run.execute()
    return build_record(schedule, target, settings, raw, facts), raw.rows


@contextmanager
def signals_stop(run: Run) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops the run in order; off the main thread signals stay as they are."""
    loop = asyncio.get_running_loop()
    handled = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, run.stop, INTERRUPTED)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
