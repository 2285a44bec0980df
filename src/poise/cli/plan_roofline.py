"""`poise plan roofline`: what a step costs, what binds, and the least time that leaves, on a named machine or on this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from poise.cli.planning import offline_option, planned_model, report_options, show, svg_option
from poise.errors import ConfigError

if TYPE_CHECKING:
    from poise.planner.hardware import Machine
    from poise.planner.roofline import Costs, Options

SMALLEST_PROBE = 2**20
LARGEST_PROBE = 2**30
TERM_NAMES = ("attention", "dequantisation", "experts", "communication")


@click.command("roofline")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--parameters", metavar="N", help="Instead of MODEL: parameters alone, as 7e9; no attention.")  # fmt: skip
@click.option("--hardware", metavar="NAME,…", help="Known machines (h100, a100-80gb, l4, epyc-9654, …), FILE.toml, or measure: this machine.")  # fmt: skip
@click.option("--bandwidth", metavar="RATE", help="Memory bandwidth, as 2TB/s: instead of the machine's, or without one.")  # fmt: skip
@click.option("--peak", metavar="RATE", help="Peak, as 312TFLOP/s: instead of the machine's, or without one.")  # fmt: skip
@click.option("--compute", metavar="TYPE", help="Take the machine's peak for bf16, f16, fp8, int8 or f32. [default: its usual one]")  # fmt: skip
@click.option("--weight-bits", metavar="N", help="Bits of a weight, scales included. [default: as stored; 16 for a shape]")  # fmt: skip
@click.option("--kv-dtype", metavar="TYPE", default="bf16", help="f32, bf16, f16, fp8, int8 or int4. [default: bf16]")  # fmt: skip
@click.option("--batch", metavar="N,…", default="1,32", help="Sequences of a decode step. [default: 1,32]")  # fmt: skip
@click.option("--context", metavar="TOKENS", default="1024", help="Tokens of each decoding sequence. [default: 1024]")  # fmt: skip
@click.option("--prompt", metavar="TOKENS", default="2048", help="Tokens of the prefill. [default: 2048]")  # fmt: skip
@click.option("--experts", metavar="E,K", help="K of E experts in place of each MLP.")
@click.option("--tensor-parallel", metavar="N", default="1", help="Devices that share the model. [default: 1]")  # fmt: skip
@click.option("--link", metavar="RATE", help="Bandwidth between them, one direction, as 450GB/s. [default: the machine's]")  # fmt: skip
@click.option("--link-latency", metavar="MS", default="0", help="Milliseconds of each exchange besides. [default: 0]")  # fmt: skip
@click.option("--dequantise", metavar="FLOP", help="FLOPs to unpack a weight, added to the work. [default: 0; 2 in its term]")  # fmt: skip
@click.option("--tile-rows", metavar="N", default="64", help="Rows for which an unpacked weight is used. [default: 64]")  # fmt: skip
@click.option("--term", type=click.Choice(TERM_NAMES), help="Show one term alone.")
@offline_option
@svg_option
@report_options
def command(
    model: str | None,
    parameters: str | None,
    hardware: str | None,
    bandwidth: str | None,
    peak: str | None,
    compute: str | None,
    weight_bits: str | None,
    kv_dtype: str,
    batch: str,
    context: str,
    prompt: str,
    experts: str | None,
    tensor_parallel: str,
    link: str | None,
    link_latency: str,
    dequantise: str | None,
    tile_rows: str,
    term: str | None,
    offline: bool,
    svg: Path | None,
    as_json: bool,
    explain: bool,
) -> None:
    """FLOPs, bytes and bounds of prefill and decode for MODEL, or for so many --parameters.

    Every time is an optimistic bound, not a measurement.
    """
    from poise.planner import roofline, terms
    from poise.planner.hardware import bytes_per_second
    from poise.planner.inputs import between, several, whole

    costs = _costs(model, parameters, weight_bits, kv_dtype, experts, offline)
    machines = _machines(
        hardware, bandwidth, peak, costs.num_parameters * costs.bytes_per_parameter
    )
    default_unpacking = 2.0 if term == "dequantisation" else 0.0
    options = roofline.Options(
        compute=compute,
        dequantise=default_unpacking if dequantise is None else between("--dequantise", dequantise, 0, 1e6),
        tile_rows=whole("--tile-rows", tile_rows, 1, 1_000_000),
        devices=whole("--tensor-parallel", tensor_parallel, 1, 4096),
        link=None if link is None else bytes_per_second("--link", link),
        link_seconds=between("--link-latency", link_latency, 0, 1e6) / 1e3,
    )  # fmt: skip
    options = _shared_by_devices(costs, machines, options)
    batches = several("--batch", batch, lambda name, value: whole(name, value, 1, 10**9))
    steps = roofline.phases(
        batches,
        whole("--context", context, 1, 10**9),
        whole("--prompt", prompt, 1, 10**9),
    )
    if term is None:
        report = roofline.plan(costs, machines, steps, options)
    elif len(machines) > 1:
        raise ConfigError(
            f"--term {term} is shown for one machine, --hardware names {len(machines)}"
        )
    else:
        report = terms.plan(term, costs, machines[0], steps, options)
    if svg is not None:
        from poise.planner import plot
        from poise.planner.svg import write

        write(svg, plot.picture(costs, machines, steps, options))
    show(report, as_json, explain)


def _costs(
    model: str | None,
    parameters: str | None,
    weight_bits: str | None,
    kv_dtype: str,
    experts: str | None,
    offline: bool,
) -> Costs:
    from poise.models.cost import KV_FORMATS, Experts
    from poise.planner.inputs import between, positive, several, whole
    from poise.planner.model import SHAPE_BITS, PlannedModel
    from poise.planner.roofline import BareWeights, ModelCosts

    if kv_dtype not in KV_FORMATS:
        raise ConfigError(f"--kv-dtype is {kv_dtype!r}: expected one of {', '.join(KV_FORMATS)}")
    bits = None if weight_bits is None else between("--weight-bits", weight_bits, 0.1, 64)
    if (model is None) == (parameters is None):
        raise ConfigError("give MODEL or --parameters, one of them")
    if model is None:
        if experts is not None:
            raise ConfigError("--experts needs a MODEL: --parameters alone has no layers")
        count = positive("--parameters", parameters, 1e15)
        return BareWeights(count, (bits or SHAPE_BITS) / 8)
    planned = planned_model(model, offline)
    if experts is not None:
        numbers = several("--experts", experts, lambda name, value: whole(name, value, 1, 10**6))
        if len(numbers) != 2 or numbers[1] > numbers[0]:
            raise ConfigError(f"--experts is {experts!r}: expected E,K with K at most E, as 8,2")
        planned = PlannedModel.of_shape(
            planned.name, planned.config, Experts(*numbers), bits or SHAPE_BITS
        )
    elif bits is not None:
        planned = planned.with_bits(bits)
    return ModelCosts(planned, KV_FORMATS[kv_dtype])


def _machines(
    hardware: str | None, bandwidth: str | None, peak: str | None, weight_bytes: float
) -> list[Machine]:
    """Each machine named, with the figures given in place of its own."""
    from poise.planner.hardware import Machine, bytes_per_second, find, flop_per_second

    names = [name.strip() for name in hardware.split(",")] if hardware else []
    rate = None if bandwidth is None else bytes_per_second("--bandwidth", bandwidth)
    flops = None if peak is None else flop_per_second("--peak", peak)
    if not names:
        if rate is None:
            raise ConfigError("give --hardware NAME (or measure: this machine), or --bandwidth")
        machine = Machine("given", "a machine as given", rate, sources={"bandwidth": "--bandwidth"})
        machines = [machine]
    else:
        machines = [_measured(weight_bytes) if name == "measure" else find(name) for name in names]
    if rate is not None:
        machines = [
            replace(m, bandwidth=rate, sources={**m.sources, "bandwidth": "--bandwidth"})
            for m in machines
        ]
    if flops is not None:
        machines = [
            replace(m, peaks={"given": flops}, compute="given", sources={**m.sources, "peak.given": "--peak"})
            for m in machines
        ]  # fmt: skip
    return machines


def _measured(weight_bytes: float) -> Machine:
    """This machine by the engine's own probes, over as many bytes as the weights have, but for what memory allows."""
    from poise.executor.stored_rates import measure_rates
    from poise.machine import available_memory_bytes, cpu_model, default_threads
    from poise.planner.hardware import measured

    click.echo("measuring this machine, a few seconds …", err=True)
    room = (available_memory_bytes() or LARGEST_PROBE) // 8
    working_set = max(SMALLEST_PROBE, int(min(weight_bytes, LARGEST_PROBE, room)))
    rates = measure_rates(working_set, default_threads())
    how = (
        f"measured here, the best of several tries of poise's own {rates.isa} kernels: {working_set:,} B read by "
        f"{rates.read.threads} of {rates.threads} threads, products in registers by all; other work here makes both smaller"
    )
    return measured(
        f"this machine ({cpu_model()})", rates.read.bytes_per_second, rates.products, how
    )


def _shared_by_devices(costs: Costs, machines: list[Machine], options: Options) -> Options:
    """Checks what tensor parallelism needs, and how much of the KV each device reads."""
    from poise.planner.roofline import ModelCosts

    if options.devices == 1:
        return options
    if not isinstance(costs, ModelCosts):
        raise ConfigError("--tensor-parallel needs a MODEL: --parameters alone has no layers")
    config = costs.model.config
    if config.num_heads % options.devices:
        raise ConfigError(
            f"--tensor-parallel is {options.devices}: {costs.name} has {config.num_heads} query heads, which it does not divide"
        )
    for machine in machines:
        if options.link is None and machine.link is None:
            raise ConfigError(f"--tensor-parallel: {machine.name} has no link; give --link")
    return replace(options, kv_share=max(1 / options.devices, 1 / config.num_kv_heads))
