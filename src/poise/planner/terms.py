"""Single terms of the roofline, each alone: attention and KV, dequantisation, experts, communication between devices.

Knows what `planner/roofline` knows; each function adds one table and says in a note what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from poise.errors import ConfigError
from poise.models import cost
from poise.planner import roofline
from poise.planner.hardware import Machine
from poise.planner.report import OPTIMISTIC, Column, Report, Table, Unit
from poise.planner.roofline import Costs, ModelCosts, Options, Step

PHASE = Column("phase", "phase", Unit.WORD)
SEQUENCES = Column("sequences", "batch", Unit.SEQUENCES)
TOKENS = Column("tokens", "new", Unit.TOKENS_PER_STEP)


def plan(
    term: str, costs: Costs, machine: Machine, steps: Sequence[Step], options: Options
) -> Report:
    """The report on one term of TERMS."""
    report = Report("roofline", f"{term} of {costs.name} on {machine.title} ({OPTIMISTIC})")
    TERMS[term](report, costs, machine, steps, options)
    report.notes += roofline.notes([machine], options)
    return report


def attention(
    report: Report, costs: Costs, machine: Machine, steps: Sequence[Step], options: Options
) -> None:
    """Per step: attention's own work and traffic. Its intensity does not grow with the batch: every sequence has its own KV."""
    model = _known(costs, "attention")
    config = model.model.config
    shared = config.num_heads / config.num_kv_heads
    each = model.kv.head_bytes(config.head_dim) / config.head_dim
    report.add(
        "decode_intensity", "intensity of decoding", 2 * shared / each, Unit.FLOP_PER_BYTE,
        f"2 · query heads / (KV heads · bytes) = 2 · {config.num_heads} / ({config.num_kv_heads} · {each:g}), any batch",
    )  # fmt: skip
    columns = [
        PHASE, SEQUENCES, TOKENS,
        Column("flops", "work", Unit.GIGAFLOP),
        Column("bytes", "KV traffic", Unit.GIGABYTES),
        Column("intensity", "intensity", Unit.FLOP_PER_BYTE),
        Column("flops_share", "of all work", Unit.PERCENT),
        Column("bytes_share", "of all traffic", Unit.PERCENT),
        Column("least_time", "alone at least", Unit.MILLISECONDS),
    ]  # fmt: skip
    peak = machine.peak(options.compute)
    rows: list[list[float | str | None]] = []
    for step in steps:
        found = costs.step(step)
        seconds = found.kv_bytes * options.kv_share / machine.bandwidth
        if peak is not None:
            seconds = max(seconds, found.attention_flops / (options.devices * peak))
        rows.append(
            [
                step.phase,
                step.num_sequences,
                step.rows,
                found.attention_flops / 1e9,
                found.kv_bytes / 1e9,
                found.attention_flops / found.kv_bytes,
                100 * found.attention_flops / found.flops,
                100 * found.kv_bytes / found.bytes,
                seconds * 1e3,
            ]
        )
    report.tables.append(
        Table(
            "attention", "Attention and KV traffic, a step", columns, rows,
            "work = 4 · query heads · head_dim · keys seen; traffic = keys and values seen, read once, and new ones written",
        )
    )  # fmt: skip
    report.notes.append(
        "A larger batch shares the weights but not the KV: decoding's attention stays bound by bandwidth at any batch."
    )


def dequantisation(
    report: Report, costs: Costs, machine: Machine, steps: Sequence[Step], options: Options
) -> None:
    """What smaller weights save in reading and cost in unpacking."""
    if machine.vector_peak is None and machine.peak(options.compute) is None:
        raise ConfigError("--term dequantisation needs a peak: give --peak, or a known machine")
    each = costs.bytes_per_parameter
    report.add(
        "bits", "bits of a weight", 8 * each, Unit.BITS, "bytes of the weights · 8 / parameters"
    )  # fmt: skip
    report.add(
        "read_gain", "weights read faster", 2 / each, Unit.TIMES, "2 B a weight / bytes of a weight: against bf16"
    )  # fmt: skip
    columns = [
        PHASE, SEQUENCES, TOKENS,
        Column("read_time", "reading", Unit.MILLISECONDS),
        Column("read_time_bf16", "in bf16", Unit.MILLISECONDS),
        Column("unpack_time", "unpacking", Unit.MILLISECONDS),
        Column("unpack_share", "of all work", Unit.PERCENT),
        Column("gain", "step against bf16", Unit.TIMES),
    ]  # fmt: skip
    rows: list[list[float | str | None]] = []
    for step in steps:
        found = costs.step(step)
        read = found.weight_bytes / machine.bandwidth / options.devices
        unpack = roofline.dequantise_seconds(costs, machine, step, options) / options.devices
        peak = machine.peak(options.compute)
        work = 0.0 if peak is None else found.flops / peak / options.devices
        kv = found.kv_bytes * options.kv_share / machine.bandwidth
        before = max(work, read * 2 / each + kv)
        rows.append(
            [
                step.phase,
                step.num_sequences,
                step.rows,
                read * 1e3,
                read * 2 / each * 1e3,
                unpack * 1e3,
                100 * unpack / (work + unpack) if work else None,
                before / max(work + unpack, read + kv),
            ]
        )
    report.tables.append(
        Table(
            "dequantisation",
            f"Dequantisation, {options.dequantise:g} FLOP a weight, once for each tile of {options.tile_rows} rows",
            columns, rows,
            "unpacking = FLOP a weight · weights read · ⌈rows / tile⌉ / f32 peak; step = max(work + unpacking, traffic)",
        )
    )  # fmt: skip
    report.notes.append(
        "Smaller weights buy reading, so they help where bandwidth binds; where compute binds, unpacking only adds. "
        "Says nothing of quality, which has to be measured on the task."
    )


def experts(
    report: Report, costs: Costs, machine: Machine, steps: Sequence[Step], options: Options
) -> None:
    """How many experts a step is expected to read."""
    model = _known(costs, "experts").model
    if model.experts.num_experts == 1:
        raise ConfigError(f"--term experts: {model.name} has no experts; give --experts E,K")
    total, active = model.experts.num_experts, model.experts.num_active
    used = cost.active_parameters(model.config, model.experts) + cost.output_parameters(
        model.config
    )
    report.add(
        "total_parameters", "in memory", model.num_parameters, Unit.PARAMETERS, "all experts"
    )
    report.add(
        "active_parameters", "met by a token", used, Unit.PARAMETERS,
        f"{active} of {total} experts in each layer, attention, router and output matrix",
    )  # fmt: skip
    columns = [
        PHASE, SEQUENCES, TOKENS,
        Column("distinct_experts", "distinct", Unit.EXPERTS),
        Column("weight_bytes", "weights read", Unit.GIGABYTES),
        Column("bytes_per_token", "a token", Unit.GIGABYTES),
        Column("read_time", "at least", Unit.MILLISECONDS),
    ]  # fmt: skip
    rows: list[list[float | str | None]] = []
    for step in steps:
        read = costs.step(step).weight_bytes
        rows.append(
            [
                step.phase,
                step.num_sequences,
                step.rows,
                cost.distinct_experts(model.experts, step.rows),
                read / 1e9,
                read / step.rows / 1e9,
                read / machine.bandwidth / options.devices * 1e3,
            ]
        )
    report.tables.append(
        Table(
            "experts", f"Mixture of experts, {active} of {total} a token", columns, rows,
            "distinct = E (1 − (1 − k/E)ⁿ) in each layer, choices independent and uniform",
        )
    )  # fmt: skip
    report.notes.append(
        "Memory is paid for all experts, FLOPs for the active ones, bandwidth for the distinct ones of a step: a batch needs to be "
        "larger than a dense model's before weights are shared. Routers with favourites read fewer."
    )


def communication(
    report: Report, costs: Costs, machine: Machine, steps: Sequence[Step], options: Options
) -> None:
    """Tensor parallelism: what crosses the link in a step."""
    _known(costs, "communication")
    if options.devices == 1:
        raise ConfigError("--term communication needs --tensor-parallel 2 or more")
    link = options.link or machine.link
    assert link is not None
    report.add(
        "link", "link, one direction", link, Unit.BYTES_PER_SECOND, "as given, or the data sheet's"
    )
    columns = [
        PHASE, SEQUENCES, TOKENS,
        Column("sent", "each sends", Unit.GIGABYTES),
        Column("link_time", "exchanging", Unit.MILLISECONDS),
        Column("rest_time", "the rest", Unit.MILLISECONDS),
        Column("share", "of the step", Unit.PERCENT),
        Column("gain", "against one device", Unit.TIMES),
    ]  # fmt: skip
    rows: list[list[float | str | None]] = []
    for step in steps:
        sent, _ = roofline.exchanged_bytes(costs, step, options.devices)
        least = roofline.bound(costs, machine, step, options)
        alone = roofline.bound(costs, machine, step, Options(compute=options.compute))
        rows.append(
            [
                step.phase,
                step.num_sequences,
                step.rows,
                sent / 1e9,
                least.link * 1e3,
                (least.seconds - least.link) * 1e3,
                100 * least.link / least.seconds,
                alone.seconds / least.seconds,
            ]
        )
    report.tables.append(
        Table(
            "communication", f"Tensor parallel over {options.devices} devices", columns, rows,
            "each sends 2 (t − 1)/t · 2 · layers · new tokens · hidden · 2 B (two ring all-reduces a layer, bf16)",
        )
    )  # fmt: skip
    report.notes.append(
        f"Each of the exchanges also waits {options.link_seconds * 1e3:g} ms (--link-latency); they are not overlapped with the rest."
    )


def _known(costs: Costs, term: str) -> ModelCosts:
    if not isinstance(costs, ModelCosts):
        raise ConfigError(f"--term {term} needs a MODEL: --parameters alone has no layers")
    return costs


Term = Callable[[Report, Costs, Machine, Sequence[Step], Options], None]
TERMS: dict[str, Term] = {
    "attention": attention,
    "dequantisation": dequantisation,
    "experts": experts,
    "communication": communication,
}
