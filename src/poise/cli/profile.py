"""`poise profile`: where the time of serving goes, on a model of this process or on a running server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from poise.cli.options import model_argument, settings_options
from poise.config import (
    CacheConfig,
    ComputeConfig,
    ModelSource,
    SchedulerConfig,
    Settings,
    SpeculationConfig,
)
from poise.errors import PoiseError

if TYPE_CHECKING:
    from poise.executor.stored_rates import MachineRates

SEED = 0
MODELLED = "bytes are modelled, not counted"


@click.command("profile")
@model_argument
@settings_options(ModelSource, CacheConfig, SchedulerConfig, ComputeConfig, SpeculationConfig)
@click.option("--concurrency", type=click.IntRange(1), default=1, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--output-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--url", help="Profile this running server instead (started with --enable-profiling)."
)
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=10.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the last steps as a trace for Perfetto.",
)
def command(
    settings: Settings,
    concurrency: int,
    prompt_tokens: int,
    output_tokens: int,
    url: str | None,
    seconds: float,
    as_json: bool,
    trace: Path | None,
) -> None:
    """Time every operation of MODEL under a load of random prompts, or of a server under the load it has."""
    if url is not None:
        figures, events = _profile_server(url, seconds)
    else:
        figures, events = _profile_here(settings, concurrency, prompt_tokens, output_tokens)
    if trace is not None:
        trace.write_text(json.dumps(events))
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        _show(figures)
        if trace is not None:
            click.echo(f"trace: {trace} (open it at https://ui.perfetto.dev)")


def _profile_server(url: str, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Profiles a running server for that long."""
    import asyncio

    import aiohttp

    async def profile() -> dict[str, Any]:
        async with aiohttp.ClientSession() as session:
            await _post(session, f"{url.rstrip('/')}/start_profile")
            await asyncio.sleep(seconds)
            return await _post(session, f"{url.rstrip('/')}/stop_profile")

    async def _post(session: aiohttp.ClientSession, address: str) -> dict[str, Any]:
        async with session.post(address) as response:
            if response.status == 404:
                raise PoiseError(f"{url} offers no profiling; start it with --enable-profiling")
            if response.status != 200:
                raise PoiseError(f"{address} answered {response.status}: {await response.text()}")
            body = await response.read()
            answer: dict[str, Any] = json.loads(body) if body else {}
            return answer

    try:
        answer = asyncio.run(profile())
    except (aiohttp.ClientError, OSError) as error:
        raise PoiseError(f"{url} does not answer: {error}") from None
    return answer["figures"], answer["trace"]


def _profile_here(
    settings: Settings, concurrency: int, prompt_tokens: int, output_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs random prompts to their end, once to warm up and once more timed; then probes the machine."""
    from time import monotonic_ns

    from poise.cli.local_engine import load_local_engine
    from poise.core.sampling_params import SamplingParams
    from poise.engine.client import EngineRequest
    from poise.engine.profile import profile_report, trace_events
    from poise.executor.hardware_counters import HardwareCounters
    from poise.executor.stored_rates import measure_and_store

    engine = load_local_engine(settings)
    try:
        numbers = random.Random(SEED)

        def run(num_output_tokens: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
            for key in range(concurrency):
                prompt = [numbers.randrange(engine.info.vocab_size) for _ in range(prompt_tokens)]
                engine.add_request(key, EngineRequest(f"profile-{key}", prompt, params, SEED))
            while engine.has_unfinished_requests():
                engine.step()

        run(min(output_tokens, 4))
        engine.start_profile()
        with HardwareCounters() as counters:
            run(output_tokens)
            counted = counters.read()
        end = monotonic_ns()
        profile, executor = engine.stop_profile()
        figures = profile_report(profile, executor, end)
        figures["model"] = engine.info.model
        figures["load"] = {
            "concurrency": concurrency,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
        }
        figures["counters"] = counted or None
        figures["counters_refused"] = counters.refused
        details = engine.info.details
    finally:
        engine.close()
    rates = measure_and_store(int(details["packed_bytes"]), int(details["threads"]))
    figures["machine"] = rates.as_dict()
    figures["shares"] = _shares(figures, rates)
    return figures, trace_events(profile, executor)


def _shares(figures: dict[str, Any], rates: MachineRates) -> dict[str, dict[str, float]]:
    """Of the machine's rates, by kind of operation: what it read and computed in its time."""
    return {
        name: {
            "read": kind["read_bytes"] / kind["seconds"] / rates.read.bytes_per_second,
            "int8": kind["flops"] / kind["seconds"] / rates.products["int8"],
        }
        for name, kind in figures["operations"].items()
        if kind["seconds"]
    }


def _show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    steps = figures["steps"]
    console = Console()
    if not steps:
        raise PoiseError("no step ran: there was no request while the profile was taken")
    shares = figures.get("shares", {})
    table = Table(title=f"{steps:,} steps, {figures['rows_per_step']:.1f} rows per step")
    table.add_column("operation", no_wrap=True)
    for column in ("ms per step", "share", "GB/s", "GOPS", "of read", "of int8"):
        table.add_column(column, justify="right")

    def row(name: str, seconds: float, *more: str) -> None:
        table.add_row(
            name,
            f"{seconds / steps * 1e3:.3f}",
            f"{seconds / total:.1%}",
            *more,
        )

    python = figures["python_seconds"]
    total = figures["native_seconds"] + sum(value or 0 for value in python.values())
    total += figures["profiling_seconds"]
    for name, kind in figures["operations"].items():
        seconds = kind["seconds"]
        share = shares.get(name)
        row(
            name,
            seconds,
            f"{kind['read_bytes'] / seconds / 1e9:.1f}" if seconds else "",
            f"{kind['flops'] / seconds / 1e9:.1f}" if seconds else "",
            f"{share['read']:.0%}" if share else "",
            f"{share['int8']:.0%}" if share else "",
        )
    row("other native", figures["other_native_seconds"])
    for name, value in python.items():
        if value is not None:
            row(f"{name} (Python)", value)
    row("profiling itself", figures["profiling_seconds"])
    console.print(table)
    waits = ", ".join(f"{wait / figures['seconds']:.1%}" for wait in figures["worker_wait_seconds"])
    click.echo(f"workers waited for each other {waits} of the time")
    if figures["spared_keys"]:
        click.echo(
            f"shared prefixes: {figures['spared_keys'] / steps:,.0f} keys per step were read for another request"
        )
    if "machine" in figures:
        _show_machine(figures)


def _show_machine(figures: dict[str, Any]) -> None:
    machine = figures["machine"]
    products = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in machine["products"].items())
    click.echo(
        f"machine: reads {machine['read_bytes_per_second'] / 1e9:.1f} GB/s over {machine['working_set_bytes'] / 2**20:.0f} MiB; "
        f"products on registers, GOPS: {products} ({machine['isa']}, {machine['threads']} threads)"
    )
    if figures["counters"]:
        click.echo("counted: " + ", ".join(f"{n} {v:,}" for n, v in figures["counters"].items()))
    else:
        click.echo(f"{MODELLED} ({figures['counters_refused']})")
