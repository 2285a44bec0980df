"""What the scheduler promises, timed on this machine with a real model: one record, and one figure for each part.

    python benchmarks/scheduling.py                      all parts
    python benchmarks/scheduling.py --part long-prompt   one of them, in a record of its own

The engine runs in this process, so that times are the engine's and nothing else's; HTTP has its own tests. The parts:
long-prompt (a 7,000-token prompt among 16 streams, with and without --target-itl-ms), tenants (one that floods beside a light
one: fcfs, fair, reserved; with the throughput that the reservation costs), pressure (a pool of 5 % of the need) and flood (10,000
requests at once). Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from poise.bench.record import write_bytes
from poise.bench.runner import provenance
from poise.config import CacheConfig, ComputeConfig, ModelSource, SchedulerConfig
from poise.core.request import RequestOwner
from poise.core.sampling_params import SamplingParams
from poise.core.tenant import NO_TENANTS, Share, Tenant, TenantTable
from poise.engine.async_client import InProcessClient
from poise.engine.build import assemble_engine, open_source
from poise.engine.client import EngineRequest, deltas_of
from poise.engine.llm_engine import LLMEngine
from poise.errors import QueueFullError
from poise.executor.load import load_executor
from poise.executor.step_cost import probe
from poise.tokenizer.tokenizer import Tokenizer

SCHEMA = "poise.benchmarks.scheduling/1"
DOCS = Path(__file__).parents[1] / "docs"
LIMITS = SchedulerConfig(max_num_seqs=16).without_queue_bounds()
Figures = dict[str, Any]


class SchedulingRecord(msgspec.Struct):
    """`figures` by part: numbers, series for the figures, and under "held" what had to hold and whether it did."""

    created: str
    model: str
    provenance: dict[str, Any]
    figures: dict[str, Figures]
    schema: str = SCHEMA


class Rig:
    """One loaded model, and engines around it."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.cache = CacheConfig()
        self.checkpoint = open_source(self.source)
        limits = replace(LIMITS, max_num_seqs=64)  # of all parts, for the sizes of arrays
        self.loaded = load_executor(self.checkpoint, self.cache, limits, ComputeConfig())
        self.tokenizer = Tokenizer(self.checkpoint.tokenizer)
        loaded = self.loaded
        most = limits.max_num_batched_tokens
        self.fit = probe(
            loaded.executor, loaded.kv_groups, loaded.block_size, loaded.step_cost, most
        )

    def engine(
        self,
        limits: SchedulerConfig,
        tenants: TenantTable = NO_TENANTS,
        num_blocks: int | None = None,
    ) -> LLMEngine:
        """One with an empty cache; the step-time model has seen two probes only."""
        loaded = self.loaded
        if num_blocks is not None:
            loaded = replace(loaded, kv_cache=replace(loaded.kv_cache, num_blocks=num_blocks))
        return assemble_engine(
            self.source,
            self.cache,
            limits,
            self.checkpoint,
            loaded,
            self.tokenizer,
            tenants,
            self.fit,
        )

    def request(
        self, name: str, num_prompt: int, num_output: int, tenant: str = "default"
    ) -> EngineRequest:
        """Random ids that depend on the name, and exactly `num_output` tokens."""
        rng = random.Random(name)
        prompt = [rng.randrange(self.loaded.vocab_size) for _ in range(num_prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        return EngineRequest(name, prompt, params, 1, RequestOwner(tenant))


@dataclass
class Stream:
    """When a request's tokens came."""

    arrival: float
    tokens: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    done: bool = False

    @property
    def first(self) -> float:
        return self.tokens[0] - self.arrival


class Run:
    """Drives an engine step by step and notes every token."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.streams: dict[str, Stream] = {}
        self.steps: list[tuple[float, float]] = []  # (begin, seconds)
        self._names: list[str] = []

    def add(self, request: EngineRequest) -> Stream:
        stream = self.streams[request.request_id] = Stream(time.monotonic())
        self._names.append(request.request_id)
        self.engine.add_request(len(self._names) - 1, request)
        return stream

    def step(self) -> None:
        begin = time.monotonic()
        outputs = self.engine.step()
        now = time.monotonic()
        self.steps.append((begin, now - begin))
        for key, delta in outputs:
            stream = self.streams[self._names[key]]
            for choice in delta.choices:
                stream.tokens += [now] * len(choice.token_ids)
                stream.ids += choice.token_ids
            stream.done = delta.stats is not None

    def until(self, reached: Callable[[], bool], seconds: float = 600.0) -> None:
        end = time.monotonic() + seconds
        while not reached() and time.monotonic() < end and self.engine.has_unfinished_requests():
            self.step()

    def close(self) -> None:
        self.engine.abort_all()
        self.engine.take_outputs()


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value with at least a part `q` of all at or below it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-q * len(ordered) // 1) - 1))]


# --- a long prompt among streams ------------------------------------------------------------------

LEAST_TARGET = 0.04
"""Seconds; where the streams alone need more than a third of it for a step, the target is three times their step."""


def long_prompt(rig: Rig, num_tokens: int = 7000, num_streams: int = 16) -> Figures:
    """Gaps of 16 streams while the prompt is computed; the prompt's first token; tokens per second."""
    limits = replace(LIMITS, max_num_seqs=32)
    solo = Run(rig.engine(limits))
    alone = solo.add(rig.request("solo", num_tokens, 1))
    solo.until(lambda: alone.done)
    figures: Figures = {
        "prompt_tokens": num_tokens,
        "streams": num_streams,
        "solo_first_token": alone.first,
    }
    target = 0.0
    for name in ("without", "with"):
        run = Run(rig.engine(replace(limits, target_itl_ms=1e3 * target)))
        streams = [run.add(rig.request(f"stream {i}", 32, 2000)) for i in range(num_streams)]
        run.until(lambda: len(streams[-1].tokens) >= 60)  # noqa: B023 - run at once
        begin = time.monotonic()
        if name == "without":
            alone_step = quantile([seconds for _, seconds in run.steps[-30:]], 0.5)
            target = max(LEAST_TARGET, 3 * alone_step)
        long = run.add(rig.request("long", num_tokens, 1))
        run.until(lambda: long.done)  # noqa: B023
        end = time.monotonic()
        gaps = [
            after - before
            for stream in streams
            for before, after in zip(stream.tokens, stream.tokens[1:])
            if begin <= after
        ]
        made = sum(token >= begin for stream in streams for token in stream.tokens)
        figures[name] = {
            "gap_p50": quantile(gaps, 0.5),
            "gap_p99": quantile(gaps, 0.99),
            "gap_max": max(gaps),
            "first_token": long.first,
            "tokens_per_second": (num_tokens + made) / (end - begin),
            "series": [[t - begin, s] for t, s in run.steps if t >= begin - 2],
        }
        run.close()
    held, free = figures["with"], figures["without"]
    figures["step_of_the_streams"] = alone_step
    figures["target"] = target
    figures["held"] = {
        "p99 gap at most 2 x the target": held["gap_p99"] <= 2 * target,
        "first token within 3 x solo": held["first_token"] <= 3 * alone.first,
        "tokens/s at least 85 % of without": held["tokens_per_second"]
        >= 0.85 * free["tokens_per_second"],
        "the stall without a target": free["gap_p99"] > 2 * target,
    }
    return figures


# --- a tenant that floods -------------------------------------------------------------------------

RESERVED = TenantTable({"light": Tenant("light", reserved=Share(0.1, 0.1, 0.1))})
NAMED = TenantTable({"light": Tenant("light"), "heavy": Tenant("heavy")})


def tenants(rig: Rig, seconds: float = 60.0, every: float = 2.0) -> Figures:
    """The light tenant's time to first token, and everybody's tokens per second, under each policy."""
    figures: Figures = {"solo": _beside(rig, LIMITS, NO_TENANTS, seconds / 2, every, flood=False)}
    for name, policy, table in (
        ("fcfs", "fcfs", NO_TENANTS),
        ("fair", "fair", NAMED),
        ("reserved", "fair", RESERVED),
    ):
        limits = replace(LIMITS, scheduling_policy=policy)  # type: ignore[arg-type]
        figures[name] = _beside(rig, limits, table, seconds, every, flood=True)
    solo, reserved = figures["solo"], figures["reserved"]
    bound = solo["first_token_p95"] + 4 * reserved["step_p95"]  # three steps and one preemption
    figures["bound_p95"] = bound
    figures["cost_of_reservation"] = (
        1 - reserved["tokens_per_second"] / figures["fcfs"]["tokens_per_second"]
    )
    figures["held"] = {
        "reserved: p95 at most solo + three loaded steps + one preemption": (
            reserved["first_token_p95"] <= bound
        ),
        "fcfs: the light tenant waits": figures["fcfs"]["first_token_p95"] > 4 * bound,
    }
    return figures


def _beside(
    rig: Rig,
    limits: SchedulerConfig,
    table: TenantTable,
    seconds: float,
    every: float,
    *,
    flood: bool,
) -> Figures:
    """A light request `every` so many seconds; with `flood`, a heavy tenant that holds every slot."""
    run = Run(rig.engine(limits, table))
    light: list[Stream] = []
    num_heavy = 0
    if flood:
        for _ in range(4 * limits.max_num_seqs):
            run.add(rig.request(f"heavy {num_heavy}", 64, 1000, "heavy"))
            num_heavy += 1
        run.until(lambda: all(s.tokens for s in list(run.streams.values())[: limits.max_num_seqs]))
    begin = time.monotonic()
    while (now := time.monotonic()) < begin + seconds:
        if now >= begin + every * len(light):
            light.append(run.add(rig.request(f"light {len(light)}", 64, 16, "light")))
        if run.engine.has_unfinished_requests():
            run.step()
        else:
            time.sleep(1e-3)
    end = time.monotonic()
    # Those that still wait have waited at least so long.
    waits = [s.first if s.tokens else end - s.arrival for s in light]
    made = sum(t >= begin for stream in run.streams.values() for t in stream.tokens)
    steps = [s for t, s in run.steps if t >= begin]
    run.close()
    return {
        "light_requests": len(light),
        "light_served": sum(bool(s.tokens) for s in light),
        "first_token_p50": quantile(waits, 0.5),
        "first_token_p95": quantile(waits, 0.95),
        "step_p95": quantile(steps, 0.95),
        "tokens_per_second": made / (end - begin),
        "preemptions": run.engine.metrics.num_preemptions,
        "series": [[s.arrival - begin, wait] for s, wait in zip(light, waits)],
    }


# --- too few pages --------------------------------------------------------------------------------


def pressure(rig: Rig, num_requests: int = 32) -> Figures:
    """The same answers from a pool of a twentieth of the need; what recomputing costs."""
    prompt, output = 64, 192
    groups = len(rig.loaded.kv_groups)
    each = groups * -(-(prompt + output) // rig.loaded.block_size)
    figures: Figures = {"requests": num_requests, "need_blocks": num_requests * each}
    answers: dict[str, list[list[int]]] = {}
    limits = replace(LIMITS, max_num_seqs=num_requests)
    for name, part in (("ample", 1.0), ("half", 0.5), ("twentieth", 0.05)):
        num_blocks = max(each + groups, int(part * num_requests * each))
        run = Run(rig.engine(limits, num_blocks=num_blocks))
        streams = [run.add(rig.request(f"r{i}", prompt, output)) for i in range(num_requests)]
        begin = time.monotonic()
        run.until(lambda: all(stream.done for stream in streams))  # noqa: B023 - run at once
        answers[name] = [stream.ids for stream in streams]
        figures[name] = {
            "blocks": num_blocks,
            "seconds": time.monotonic() - begin,
            "preemptions": run.engine.metrics.num_preemptions,
            "finished": sum(stream.done for stream in streams),
        }
        run.close()
    figures["held"] = {
        "everything finishes": figures["twentieth"]["finished"] == num_requests,
        "the same tokens": answers["twentieth"] == answers["half"] == answers["ample"],
    }
    return figures


# --- ten thousand at once -------------------------------------------------------------------------


def flood(rig: Rig, num_requests: int = 10_000, horizon: float = 90.0) -> Figures:
    """Bounded queue: how soon refusals come, whether retries succeed, what the admitted ones notice."""
    return asyncio.run(_flood(rig, num_requests, horizon))


async def _flood(rig: Rig, num_requests: int, horizon: float) -> Figures:
    limits = SchedulerConfig(max_num_seqs=16)
    each = len(rig.loaded.kv_groups) * -(-(32 + 24) // rig.loaded.block_size)
    num_blocks = 2 * each * limits.max_num_seqs  # soon touched: what grows then is not the KV cache
    client = InProcessClient(rig.engine(limits, num_blocks=num_blocks))
    calm = await asyncio.gather(*(_ask(client, rig, f"calm {i}") for i in range(16)))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    first = await asyncio.gather(*(_ask(client, rig, f"flood {i}") for i in range(num_requests)))
    refused = [a for a in first if a.retry_after is not None]
    served = [a for a in first if a.retry_after is None]
    due = [a for a in refused if a.at + (a.retry_after or 0.0) < begin + horizon]
    again = await asyncio.gather(*(_return(client, rig, answer) for answer in due))
    succeeded = sum(answer.retry_after is None for answer in again)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    fresh_begin = time.monotonic()
    await _ask(client, rig, "fresh")
    fresh = time.monotonic() - fresh_begin
    await client.close()
    # Of the admitted ones, how long they ran: from admission, since they do wait their turn.
    p50 = {
        name: quantile([a.running for a in group], 0.5)
        for name, group in (("calm", calm), ("flood", served))
    }
    figures: Figures = {
        "requests": num_requests,
        "refused": len(refused),
        "refusal_p50": quantile([a.seconds for a in refused], 0.5),
        "refusal_p99": quantile([a.seconds for a in refused], 0.99),
        "retries": len(again),
        "retries_succeeded": succeeded,
        "running_p50": p50,
        "grown_mib": grown / 1024,
        "fresh_seconds": fresh,
        "series": sorted([a.at - begin, a.retry_after] for a in refused),
    }
    figures["held"] = {
        "refusals within 0.5 s (p99)": figures["refusal_p99"] <= 0.5,
        "at least 90 % of retries succeed": bool(again) and succeeded >= 0.9 * len(again),
        "the admitted run as fast as in calm (p50 within 10 %)": p50["flood"] <= 1.1 * p50["calm"],
        "a fresh request within 5 s": fresh <= 5.0,
        "less than 200 MiB for the flood": grown / 1024 < 200,
    }
    return figures


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request went: `retry_after` where it was refused; `running` from its admission to its end."""

    name: str
    at: float
    seconds: float
    running: float = 0.0
    retry_after: float | None = None


async def _ask(client: InProcessClient, rig: Rig, name: str) -> Answer:
    begin = time.monotonic()
    queued = 0.0
    try:
        async for delta in deltas_of(client, rig.request(name, 32, 24)):
            queued = delta.stats.queue_seconds if delta.stats else queued
    except QueueFullError as error:
        now = time.monotonic()
        return Answer(name, now, now - begin, retry_after=error.retry_after_seconds)
    seconds = time.monotonic() - begin
    return Answer(name, begin, seconds, running=seconds - queued)


async def _return(client: InProcessClient, rig: Rig, refused: Answer) -> Answer:
    await asyncio.sleep(refused.at + (refused.retry_after or 0.0) - time.monotonic())
    return await _ask(client, rig, refused.name)


PARTS: Mapping[str, Callable[[Rig], Figures]] = {
    "long-prompt": long_prompt,
    "tenants": tenants,
    "pressure": pressure,
    "flood": flood,
}


def main(command_line: Sequence[str] | None = None) -> int:
    """Runs the parts, prints what held, writes record and figures. Exit status 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--part", choices=PARTS, action="append", help="several times for several")
    parser.add_argument("--records", type=Path, default=DOCS / "records")
    parser.add_argument("--images", type=Path, default=DOCS / "images")
    arguments = parser.parse_args(command_line)
    rig = Rig(ModelSource(arguments.model, load_format=arguments.load_format))
    now = datetime.now(UTC)
    record = SchedulingRecord(now.isoformat(), arguments.model, provenance(), {})
    all_held = True
    for part in arguments.part or PARTS:
        record.figures[part] = found = PARTS[part](rig)
        for name, value in found.items():
            if name != "held":
                print(f"{part}: {name}: {_shown(value)}")
        for claim, held in found["held"].items():
            print(f"{part}: {'held  ' if held else 'FAILED'} {claim}", flush=True)
            all_held = all_held and held
    path = arguments.records / f"scheduling-{now:%Y%m%d-%H%M}.json"
    write_bytes(path, msgspec.json.format(msgspec.json.encode(record)))
    print(path)
    from scheduling_figures import draw

    for image in draw(record.figures, arguments.images):
        print(image)
    return 0 if all_held else 1


def _shown(value: object) -> object:
    if isinstance(value, dict):
        return {name: _shown(one) for name, one in value.items() if name != "series"}
    if isinstance(value, list):
        return f"{len(value)} values"
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
