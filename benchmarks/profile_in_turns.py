"""Two builds of poise against each other over HTTP: what a step's Python costs, by a server's own profile, in turn.

    python benchmarks/profile_in_turns.py old=OLD_ENVIRONMENT/bin/python new=NEW_ENVIRONMENT/bin/python

Each turn starts a server of one build, keeps it under streamed completions, profiles it for some seconds, and ends it. Servers take
turns rather than run side by side, since what waits in the background costs the other one its caches. Both ends share the
machine; the client only throws away what comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from poise.bench.managed_server import ManagedServer
from poise.bench.presets import find_spec, placeholders
from poise.weights.pull import resolve_model
from records import write_record

PROMPT_TOKENS = {1: 128, 32: 8}
"""By number of streams."""
WARM_UP = 2.0  # s, with all streams at work
SEED = 0
VOCABULARY = 40_000  # token ids drawn for prompts; all models at hand have more


async def stream(session: aiohttp.ClientSession, prompt: list[int], max_tokens: int) -> None:
    """One completion, read to its end and thrown away."""
    body = {
        "model": "profiled",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.content.iter_any():
            pass


async def profile(url: str, num_streams: int, seconds: float, max_tokens: int) -> dict[str, Any]:
    """The figures of a server that streams to so many readers all the while."""
    numbers = random.Random(SEED)
    async with aiohttp.ClientSession(url) as session:
        prompts = [
            [numbers.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS[num_streams])]
            for _ in range(num_streams)
        ]
        streams = [asyncio.create_task(stream(session, each, max_tokens)) for each in prompts]
        await asyncio.sleep(WARM_UP)
        (await session.post("/start_profile")).raise_for_status()
        await asyncio.sleep(seconds)
        async with session.post("/stop_profile") as response:
            response.raise_for_status()
            figures: dict[str, Any] = json.loads(await response.read())["figures"]
        if any(each.done() for each in streams):
            sys.exit(f"a stream ended before its profile: more than {max_tokens} tokens are needed")
        for each in streams:
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each
    return figures


def turn(python: str, arguments: argparse.Namespace, num_streams: int) -> dict[str, Any]:
    """One server's life."""
    preset = find_spec("poise")
    command = [python if word == "{python}" else word for word in preset.command]
    spec = msgspec.structs.replace(preset, command=[*command, "--enable-profiling"])
    path = str(resolve_model(arguments.model, offline=True))
    values = placeholders(spec, model="profiled", model_path=path, threads=arguments.threads)
    with ManagedServer(spec, values) as server:
        return uvloop.run(profile(server.url, num_streams, arguments.seconds, arguments.max_tokens))


def python_per_step(figures: dict[str, Any]) -> dict[str, float]:
    """Microseconds of Python per step by part, and their sum."""
    parts = {name: s / figures["steps"] * 1e6 for name, s in figures["python_seconds"].items()}
    return parts | {"sum": sum(parts.values())}


def main(command_line: Sequence[str] | None = None) -> int:
    """Measures, prints the medians, and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("build", nargs="+", metavar="NAME=PYTHON")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, help="default: physical cores")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--max-tokens", type=int, default=4000)
    parser.add_argument("--output", type=Path, help="default: docs/records/profile-TIME.json")
    arguments = parser.parse_args(command_line)
    builds = dict(each.split("=", 1) for each in arguments.build)
    runs: list[dict[str, Any]] = []
    for repetition in range(arguments.repeat):
        for num_streams in PROMPT_TOKENS:
            for name in builds if repetition % 2 == 0 else reversed(builds):
                figures = turn(builds[name], arguments, num_streams)
                runs.append({"build": name, "streams": num_streams, "figures": figures})
    medians = [
        {"build": name, "streams": num_streams, "microseconds_per_step": medians_of(selected)}
        for num_streams in PROMPT_TOKENS
        for name in builds
        if (selected := [r for r in runs if (r["build"], r["streams"]) == (name, num_streams)])
    ]
    for row in medians:
        shown = ", ".join(f"{k} {v:.0f}" for k, v in row["microseconds_per_step"].items())
        print(f"{row['build']}, {row['streams']} streams, µs per step: {shown}")
    settings = {"prompt_tokens": PROMPT_TOKENS, "seconds": arguments.seconds}
    record = {"model": arguments.model, "settings": settings, "medians": medians, "runs": runs}
    print(f"record: {write_record('profile', record, arguments.output)}")
    return 0


def medians_of(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Each part's median over the runs."""
    rows = [python_per_step(run["figures"]) for run in runs]
    return {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]}


if __name__ == "__main__":
    sys.exit(main())
