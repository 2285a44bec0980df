"""The roofline of a step: FLOPs, bytes, what binds, and the least time that leaves, for prefill and decode.

Knows what a step costs (`models/cost`) and what a machine can do (`planner/hardware`); measures nothing. Every time is a bound
from below: real steps are slower (Williams, Waterman and Patterson, "Roofline", 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from poise.models import cost
from poise.planner.hardware import Machine
from poise.planner.model import PlannedModel
from poise.planner.report import OPTIMISTIC, Column, Report, Table, Unit, number

IGNORED = (
    "activations' traffic, norms, rope, softmax and sampling, kernel launches, scheduling and the host, imperfect overlap, caches, "
    "clocks that fall under load"
)


MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True)
class Step:
    """`num_sequences` sequences, each with `num_tokens` new tokens after `start` that are in the cache already."""

    phase: str
    num_sequences: int
    start: int
    num_tokens: int

    @property
    def rows(self) -> int:
        return self.num_sequences * self.num_tokens


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one step, on all devices together. Bytes of weights are those read once."""

    linear_flops: float
    attention_flops: float
    weight_bytes: float
    kv_bytes: float

    @property
    def flops(self) -> float:
        return self.linear_flops + self.attention_flops

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


class Costs(Protocol):
    """What a roofline needs to know of a model."""

    @property
    def name(self) -> str: ...
    @property
    def num_parameters(self) -> float: ...
    @property
    def bytes_per_parameter(self) -> float: ...
    def step(self, step: Step) -> StepCost: ...


@dataclass(frozen=True, slots=True)
class BareWeights:
    """A model of which only the number of parameters is known: every one is read, and used by every token; no attention."""

    num_parameters: float
    bytes_per_parameter: float

    @property
    def name(self) -> str:
        return f"{number(self.num_parameters)} parameters of {self.bytes_per_parameter:g} B"

    def step(self, step: Step) -> StepCost:
        weights = self.num_parameters * self.bytes_per_parameter
        return StepCost(2 * self.num_parameters * step.rows, 0, weights, 0)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model of known shape, and how its KV is kept."""

    model: PlannedModel
    kv: cost.KVFormat = cost.BF16_KV

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def num_parameters(self) -> float:
        return self.model.num_parameters

    @property
    def bytes_per_parameter(self) -> float:
        return self.model.bytes_per_parameter

    def step(self, step: Step) -> StepCost:
        """Logits for one row of each sequence."""
        config, experts = self.model.config, self.model.experts
        sequences, tokens = step.num_sequences, step.num_tokens
        read = cost.step_parameters(config, experts, step.rows, sequences)
        kv = cost.kv_read_bytes(config, step.start, tokens, self.kv)
        kv += cost.kv_write_bytes(config, tokens, self.kv)
        return StepCost(
            linear_flops=cost.linear_flops(config, step.rows, sequences, experts),
            attention_flops=sequences * cost.attention_flops(config, step.start, tokens),
            weight_bytes=read * self.bytes_per_parameter,
            kv_bytes=sequences * kv,
        )


@dataclass(frozen=True, slots=True)
class Options:
    """`compute`: kind of number to take the peak for. `dequantise`: FLOPs to unpack a weight, once for each tile of `tile_rows`.

    `devices` share weights and heads (tensor parallel) over `link` bytes/s, one direction, `link_seconds` for each exchange.
    """

    compute: str | None = None
    dequantise: float = 0.0
    tile_rows: int = 64
    devices: int = 1
    link: float | None = None
    link_seconds: float = 0.0
    kv_share: float = 1.0  # of the KV that each device reads: 1/devices unless KV heads are fewer


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds that a step takes at least, by cause; `compute` None where the machine's peak is not known."""

    compute: float | None
    memory: float
    link: float

    @property
    def seconds(self) -> float:
        """Computing and reading overlap; exchanges between devices wait for both."""
        return max(self.compute or 0.0, self.memory) + self.link

    @property
    def binds(self) -> str:
        causes = {"compute": self.compute or 0.0, "bandwidth": self.memory, "link": self.link}
        return max(causes, key=lambda cause: causes[cause])


def bound(costs: Costs, machine: Machine, step: Step, options: Options) -> Bound:
    """The least time of one step."""
    found = costs.step(step)
    devices = options.devices
    peak = machine.peak(options.compute)
    compute = None if peak is None else found.flops / (devices * peak)
    if compute is not None and options.dequantise:
        compute += dequantise_seconds(costs, machine, step, options) / devices
    read = found.weight_bytes / devices + found.kv_bytes * options.kv_share
    return Bound(compute, read / machine.bandwidth, link_seconds(costs, machine, step, options))


def dequantise_seconds(costs: Costs, machine: Machine, step: Step, options: Options) -> float:
    """Unpacking every weight read, once for each tile of rows, at the peak of plain arithmetic."""
    peak = machine.vector_peak or machine.peak(options.compute)
    assert peak is not None
    weights = costs.step(step).weight_bytes / costs.bytes_per_parameter
    return options.dequantise * weights * -(-step.rows // options.tile_rows) / peak


def exchanged_bytes(costs: Costs, step: Step, devices: int) -> tuple[float, int]:
    """(bytes that each device sends in a step, exchanges): two ring all-reduces of the bf16 activations in each layer.

    A ring sends 2 (t − 1) / t of what is reduced (Patarasuk and Yuan 2009).
    """
    assert isinstance(costs, ModelCosts)
    config = costs.model.config
    exchanges = 2 * config.num_layers
    return 2 * (devices - 1) / devices * exchanges * step.rows * config.hidden_size * 2, exchanges


def link_seconds(costs: Costs, machine: Machine, step: Step, options: Options) -> float:
    if options.devices == 1:
        return 0.0
    link = options.link or machine.link
    assert link is not None
    sent, exchanges = exchanged_bytes(costs, step, options.devices)
    return sent / link + exchanges * options.link_seconds


def phases(batches: Sequence[int], context: int, prompt: int) -> list[Step]:
    """One decode step for each batch size, each sequence `context` tokens long, then the prefill of one prompt."""
    decodes = [Step("decode", batch, context - 1, 1) for batch in batches]
    return [*decodes, Step("prefill", 1, 0, prompt)]


def plan(
    costs: Costs, machines: Sequence[Machine], steps: Sequence[Step], options: Options
) -> Report:
    """The report: each machine's roofs, then each step on each machine."""
    first = machines[0].title if len(machines) == 1 else f"{len(machines)} machines"
    devices = f", {options.devices} devices" if options.devices > 1 else ""
    report = Report("roofline", f"Roofline of {costs.name} on {first}{devices} ({OPTIMISTIC})")
    _subject(report, costs, steps)
    report.tables.append(_machines(costs, machines, options))
    report.tables.append(_steps(costs, machines, steps, options))
    report.notes += notes(machines, options)
    return report


def notes(machines: Sequence[Machine], options: Options) -> list[str]:
    """What every output says of its bounds, and where the machines' figures come from."""
    lines = [f"Every time is an {OPTIMISTIC}. Ignored: {IGNORED}."]
    for machine in machines:
        used = {"bandwidth": "bandwidth", f"peak.{options.compute or machine.compute}": "peak"}
        if options.devices > 1 and options.link is None:
            used["link"] = "link"
        if options.dequantise:
            used["peak.f32"] = "f32 peak"
        by_source: dict[str, list[str]] = {}
        for figure, name in used.items():
            if figure in machine.sources:
                by_source.setdefault(machine.sources[figure], []).append(name)
        lines += [f"{machine.name}, {', '.join(n)}: {text}" for text, n in by_source.items()]
    return lines


def _subject(report: Report, costs: Costs, steps: Sequence[Step]) -> None:
    one = next((step for step in steps if step.phase == "decode"), steps[0])
    found = costs.step(one)
    each = costs.bytes_per_parameter
    report.add(
        "parameters",
        "parameters",
        costs.num_parameters,
        Unit.PARAMETERS,
        "given, or counted from the shape",
    )
    report.add(
        "weight_bytes_per_step", "weights read a step", found.weight_bytes, Unit.BYTES,
        f"each used weight once, {each:g} B a weight"
        + (", experts as expected" if isinstance(costs, ModelCosts) and costs.model.experts.num_experts > 1 else ""),
    )  # fmt: skip
    report.add(
        "linear_flops_per_token", "matrix products", found.linear_flops / one.rows, Unit.FLOP_PER_TOKEN,
        "2 · parameters that a token meets",
    )  # fmt: skip
    if found.attention_flops:
        report.add(
            "attention_flops_per_token", f"attention over {one.start + 1:,}",
            found.attention_flops / one.rows, Unit.FLOP_PER_TOKEN,
            "4 · query heads · head_dim · keys seen, Σ over layers",
        )  # fmt: skip
        report.add(
            "kv_bytes_per_sequence", "KV traffic of a sequence", found.kv_bytes / one.num_sequences,
            Unit.BYTES_PER_SEQUENCE, "reads of every key and value seen, and the write of one token",
        )  # fmt: skip


def compute_bound_from(costs: Costs, ridge: float) -> int | None:
    """The fewest tokens in a step whose matrix products do `ridge` FLOP for each byte of weights; None: no number does."""

    def reaches(num_tokens: int) -> bool:
        found = costs.step(Step("decode", num_tokens, 0, 1))
        return found.linear_flops >= ridge * found.weight_bytes

    if not reaches(MOST_TOKENS):
        return None
    low, high = 1, MOST_TOKENS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return low


def _machines(costs: Costs, machines: Sequence[Machine], options: Options) -> Table:
    columns = [
        Column("machine", "machine", Unit.WORD),
        Column("bandwidth", "memory", Unit.GIGABYTES_PER_SECOND),
        Column("peak", "peak", Unit.TERAFLOP_PER_SECOND),
        Column("compute", "of", Unit.WORD),
        Column("ridge", "ridge", Unit.FLOP_PER_BYTE),
        Column("compute_bound_from", "compute from", Unit.TOKENS_PER_STEP),
        Column("weight_read_limit", "weight-read limit", Unit.STEPS_PER_SECOND),
    ]
    weights = costs.step(Step("decode", 1, 0, 1)).weight_bytes
    rows: list[list[float | str | None]] = []
    for machine in machines:
        peak = machine.peak(options.compute)
        ridge = None if peak is None else peak / machine.bandwidth
        rows.append(
            [
                machine.name,
                machine.bandwidth / 1e9,
                None if peak is None else peak / 1e12,
                options.compute or machine.compute or "—",
                ridge,
                None if ridge is None else compute_bound_from(costs, ridge),
                options.devices * machine.bandwidth / weights,
            ]
        )
    return Table(
        "machines", "Roofs (data sheets, unless measured)", columns, rows,
        "ridge = peak / memory; compute from = the fewest tokens whose matrix products reach the ridge, weights alone; "
        "weight-read limit = devices · memory / weights read for one token",
    )  # fmt: skip


def _steps(
    costs: Costs, machines: Sequence[Machine], steps: Sequence[Step], options: Options
) -> Table:
    columns = [
        Column("machine", "machine", Unit.WORD),
        Column("phase", "phase", Unit.WORD),
        Column("sequences", "batch", Unit.SEQUENCES),
        Column("tokens", "new", Unit.TOKENS_PER_STEP),
        Column("flops", "work", Unit.GIGAFLOP),
        Column("bytes", "traffic", Unit.GIGABYTES),
        Column("weight_intensity", "2 n / b", Unit.FLOP_PER_BYTE),
        Column("intensity", "intensity", Unit.FLOP_PER_BYTE),
        Column("binds", "binds", Unit.WORD),
        Column("least_time", "at least", Unit.MILLISECONDS),
        Column("most_throughput", "at most", Unit.TOKENS_PER_SECOND),
    ]
    rows: list[list[float | str | None]] = []
    for machine in machines:
        for step in steps:
            found = costs.step(step)
            least = bound(costs, machine, step, options)
            rows.append(
                [
                    machine.name,
                    step.phase,
                    step.num_sequences,
                    step.rows,
                    found.flops / 1e9,
                    found.bytes / 1e9,
                    2 * step.rows / costs.bytes_per_parameter,
                    found.intensity,
                    least.binds,
                    least.seconds * 1e3,
                    step.rows / least.seconds,
                ]
            )
    if len(machines) == 1:
        columns, rows = columns[1:], [row[1:] for row in rows]
    return Table(
        "steps", f"Steps ({OPTIMISTIC})", columns, rows,
        "2 n / b: n new tokens, b bytes a weight, weights alone; intensity = work / traffic; at least = max(work / peak, traffic / memory) + exchanges; "
        "at most = new tokens / at least",
    )  # fmt: skip
