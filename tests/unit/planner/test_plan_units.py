"""No output mixes GiB with GB, ms with s, or tokens with requests: checked on the text, and by changing the units of the input.

The second is dimensional analysis by experiment. Whoever doubles all bytes must see every figure in bytes double and no other;
whoever measures time in another unit must see exactly the times and rates change. A figure under a wrong unit breaks that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.planner import compose, little, memory, roofline, schedule, speculation, terms
from poise.planner.hardware import Machine
from poise.planner.memory import Demand, KVLayers
from poise.planner.model import SHAPES, PlannedModel
from poise.planner.report import Report, Unit, number, show
from poise.planner.roofline import BareWeights, ModelCosts, Options

NUMBER = r"-?[\d,]+(?:\.\d+)?(?:e[+-]\d+)?"
SIZE = re.compile(
    rf"({NUMBER}) B(/\w+)? = ({NUMBER}) ([KMGT]i)?B(?:/\w+)? = ({NUMBER}) ([kMGT])?B(/\w+)?"
)
BINARY = {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
DECIMAL = {None: 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
NAMES = {  # what a name promises: the units it may have
    r"bytes(_per_\w+)?$": {"B", "GB", "B/token", "B/sequence", "B/block"},
    r"(^|_)time$|^latency$": {"ms", "s"},
    r"throughput": {"tokens/s"},
    r"^rate$": {"requests/s"},
    r"^concurrency$|^by_law$": {"requests"},
    r"sequences$": {"sequences"},
    r"tokens$|context$": {"tokens", "tokens/step", "tokens/request", "tokens/sequence"},
    r"iterations$": {"iterations"},
    r"intensity$|^ridge$": {"FLOP/B"},
    r"share$|^acceptance$|use$|_mass$": {"%", "WORD"},
    r"speedup$|^least$|^greatest$|gain$|^product$": {"×"},
}


def quantities(report: Report) -> Iterator[tuple[str, object, str]]:
    """(name, value, unit) of all figures and cells."""
    for figure in report.figures:
        yield figure.name, figure.value, str(figure.unit)
    for table in report.tables:
        for row in table.rows:
            for column, value in zip(table.columns, row, strict=True):
                yield f"{table.name}.{column.name}", value, str(column.unit)


def parse(text: str) -> float:
    return float(text.replace(",", ""))


def check(report: Report) -> None:
    """Units of names, sizes in both kinds, one unit of time, every cell finite."""
    used = set()
    for name, value, unit in quantities(report):
        used.add(unit)
        assert unit in set(Unit), name
        assert value is None or isinstance(value, str) or math.isfinite(value), name  # type: ignore[arg-type]
        short = name.rpartition(".")[2]
        for pattern, units in NAMES.items():
            if re.search(pattern, short):
                assert unit in units, f"{name} in {unit}"
    assert not {"ms", "s"} <= used, "milliseconds beside seconds"
    for line in report.as_text(explain=True):
        if line not in report.notes:
            check_sizes(line)


def check_sizes(line: str) -> None:
    """Binary and decimal units stand side by side and agree, or decimal alone in traffic and rates."""
    for match in SIZE.finditer(line):
        size = parse(match[1])
        assert parse(match[3]) * BINARY[match[4]] == pytest.approx(size, rel=2e-5), line
        assert parse(match[5]) * DECIMAL[match[6]] == pytest.approx(size, rel=2e-5), line
        assert match[2] == match[7], line
    rest = SIZE.sub("", line)
    assert not re.search(rf"{NUMBER} [KMGT]iB", rest), line
    assert not re.search(rf"{NUMBER} [kMGT]B(?!/s)", rest), line


BYTES = {"B", "B/token", "B/sequence", "B/block", "B/s", "GB", "GB/s"}
TIME = {"s": 1, "ms": 1, "B/s": -1, "GB/s": -1, "FLOP/s": -1, "TFLOP/s": -1}
TIME |= {"tokens/s": -1, "requests/s": -1, "steps/s": -1}


def by_bytes(unit: str) -> int:
    return 1 if unit in BYTES else -1 if unit == "FLOP/B" else 0


def by_time(unit: str) -> int:
    return TIME.get(unit, 0)


def by_requests(unit: str) -> int:
    return 1 if unit in ("requests", "requests/s", "tokens/s") else 0


def by_tokens(unit: str) -> int:
    return 1 if unit in ("tokens/request", "tokens/s") else 0


def assert_scaled(before: Report, after: Report, factor: float, power: object) -> None:
    """Each quantity of `after` is that of `before` times factor to the power its unit has."""
    pairs = zip(quantities(before), quantities(after), strict=True)
    for (name, old, unit), (_, new, _) in pairs:
        if isinstance(old, str) or old is None:
            assert new == old, name
        else:
            expected = old * factor ** power(unit)  # type: ignore[operator]
            assert new == pytest.approx(expected, rel=1e-9), f"{name} in {unit}"


layers = st.builds(
    lambda full, sliding, window, heads, dim: KVLayers(
        (None,) * full + (window,) * sliding, heads, dim
    ),
    st.integers(1, 4), st.integers(0, 5), st.integers(1, 600), st.integers(1, 16), st.sampled_from([64, 128]),
)  # fmt: skip
demands = st.builds(
    Demand,
    num_tokens=st.integers(1, 100_000),
    num_sequences=st.integers(1, 500),
    weights=st.one_of(st.none(), st.tuples(st.integers(1, 10**11), st.just("given"))),
    workspace=st.one_of(st.none(), st.tuples(st.integers(1, 10**9), st.just("given"))),
    memory=st.one_of(st.none(), st.integers(1, 10**12)),
)


@settings(max_examples=40, deadline=None)
@given(layers, demands)
def test_kv_memory(kv: KVLayers, demand: Demand) -> None:
    before = memory.plan("test", kv, 16, demand)
    check(before)
    doubled = replace(
        demand,
        weights=None if demand.weights is None else (2 * demand.weights[0], "given"),
        workspace=None if demand.workspace is None else (2 * demand.workspace[0], "given"),
        memory=None if demand.memory is None else 2 * demand.memory,
    )
    after = memory.plan("test", replace(kv, dtype="f32"), 16, doubled)
    assert_scaled(before, after, 2, by_bytes)


machines = st.builds(
    lambda bandwidth, peak: Machine("m", "m", bandwidth, {"f32": peak}, "f32", link=bandwidth / 8),
    st.floats(1e9, 1e13),
    st.floats(1e9, 1e15),
)
phases = st.builds(
    roofline.phases,
    st.lists(st.integers(1, 1000), min_size=1, max_size=3),
    st.integers(1, 8192),
    st.integers(1, 8192),
)


def faster(machine: Machine, factor: float) -> Machine:
    return replace(
        machine,
        bandwidth=machine.bandwidth * factor,
        peaks={name: peak * factor for name, peak in machine.peaks.items()},
        link=None if machine.link is None else machine.link * factor,
    )


@settings(max_examples=40, deadline=None)
@given(machines, phases, st.floats(1e8, 1e12))
def test_roofline(machine: Machine, steps: list[roofline.Step], parameters: float) -> None:
    options = Options()
    for costs in (BareWeights(parameters, 2), shape("llama-2-70b")):
        before = roofline.plan(costs, [machine], steps, options)
        check(before)
        seconds_halved = roofline.plan(costs, [faster(machine, 2)], steps, options)
        assert_scaled(before, seconds_halved, 0.5, by_time)
        wider = replace(machine, bandwidth=machine.bandwidth * 2)
        after = roofline.plan(wide(costs), [wider], steps, options)
        assert_scaled(before, after, 2, by_bytes)


def shape(name: str) -> ModelCosts:
    config, experts = SHAPES[name]
    return ModelCosts(PlannedModel.of_shape(name, config, experts))


def wide(costs: BareWeights | ModelCosts) -> BareWeights | ModelCosts:
    """The same model with twice the bytes for each weight and each value of KV."""
    if isinstance(costs, BareWeights):
        return replace(costs, bytes_per_parameter=2 * costs.bytes_per_parameter)
    kv = replace(
        costs.kv, value_bytes=2 * costs.kv.value_bytes, scale_bytes=2 * costs.kv.scale_bytes
    )
    return ModelCosts(costs.model.with_bits(32), kv)


@settings(max_examples=40, deadline=None)
@given(machines, phases, st.sampled_from(sorted(terms.TERMS)))
def test_terms_of_the_roofline(machine: Machine, steps: list[roofline.Step], term: str) -> None:
    options = Options(dequantise=2, devices=4, link_seconds=1e-5, kv_share=0.25)
    twice = replace(options, link_seconds=options.link_seconds / 2)
    before = terms.plan(term, shape("mixtral-8x7b"), machine, steps, options)
    check(before)
    after = terms.plan(term, shape("mixtral-8x7b"), faster(machine, 2), steps, twice)
    assert_scaled(before, after, 0.5, by_time)


@settings(deadline=None)
@given(st.floats(1e-2, 1e5), st.floats(1e-2, 1e5), st.floats(1, 1e5))
def test_little(rate: float, latency: float, tokens: float) -> None:
    before = little.plan(rate=rate, latency=latency, output_tokens=tokens)
    check(before)
    for factor, power, changed in (
        (0.5, by_time, {"rate": 2 * rate, "latency": latency / 2, "output_tokens": tokens}),
        (2, by_requests, {"rate": 2 * rate, "latency": latency, "output_tokens": tokens}),
        (2, by_tokens, {"rate": rate, "latency": latency, "output_tokens": 2 * tokens}),
    ):
        assert_scaled(before, little.plan(**changed), factor, power)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 5))
def test_schedule(lengths: list[int], slots: int) -> None:
    check(schedule.plan(*schedule.timelines(lengths, slots)))


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.integers(0, 64), st.floats(0, 2))
def test_speculation(acceptance: float, k: int, draft: float) -> None:
    check(speculation.plan(acceptance=acceptance, k=k, draft_cost=draft))


@settings(deadline=None)
@given(st.lists(st.sampled_from(["4x", "40%", "2x@0.5", "1.5x@30%"]), min_size=1, max_size=5))
def test_compose(texts: list[str]) -> None:
    check(compose.plan(texts))


@settings(deadline=None)
@given(st.one_of(st.integers(0, 10**15), st.floats(0.01, 1e15)), st.sampled_from(sorted(Unit)))
def test_a_quantity_is_written_with_its_unit_and_can_be_read_back(value: float, unit: Unit) -> None:
    text = show(value, unit)
    if not unit.startswith("GB"):  # a column's unit, never beside binary ones
        check_sizes(text)
    assert parse(re.match(NUMBER, text)[0]) > 0 or value < 1  # type: ignore[index]
    assert parse(number(value)) == pytest.approx(value, rel=1e-5)
    assert text.endswith(str(unit)) or unit in BYTES


def test_the_checks_catch_mixes() -> None:
    """Each wrong report fails, so that the checks above are worth something."""
    wrong = [
        [("latency", 1.0, Unit.SECONDS), ("read_time", 1.0, Unit.MILLISECONDS)],
        [("output_tokens", 1, Unit.REQUESTS)],
        [("most_sequences", 1, Unit.TOKENS)],
        [("weight_bytes", 1, Unit.TOKENS)],
        [("rate", 1, Unit.TOKENS_PER_SECOND)],
        [("ridge", math.nan, Unit.FLOP_PER_BYTE)],
    ]
    for figures in wrong:
        report = Report("test", "test")
        for name, value, unit in figures:
            report.add(name, name, value, unit, "wrong")
        with pytest.raises(AssertionError):
            check(report)
    for line in (
        "14,000,000,000 B = 14 GiB = 14 GB",  # one for the other
        "room for KV 13 GiB",  # binary alone
        "weights 14 GB",  # decimal alone
        "1,024 B/token = 1 KiB/token = 1.024 kB/sequence",
    ):
        with pytest.raises(AssertionError):
            check_sizes(line)
    before = little.plan(rate=5, latency=2)
    after = little.plan(rate=10, latency=1)
    with pytest.raises(AssertionError):
        assert_scaled(before, after, 0.5, by_requests)
