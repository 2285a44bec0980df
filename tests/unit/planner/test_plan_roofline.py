"""The roofline: worked numbers, hand-made bounds, terms alone, hardware data, the probe."""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.errors import ConfigError
from poise.models.cost import Experts
from poise.planner import hardware, plot, roofline, terms
from poise.planner.hardware import Machine
from poise.planner.model import SHAPES, PlannedModel
from poise.planner.roofline import BareWeights, ModelCosts, Options, Step, phases

TWO_TB = Machine("given", "given", 2e12, {"bf16": 312e12}, "bf16")
SEVEN_B = BareWeights(7e9, 2)


def shape(name: str) -> ModelCosts:
    config, experts = SHAPES[name]
    return ModelCosts(PlannedModel.of_shape(name, config, experts))


def column(table: object, name: str) -> list[object]:
    index = [c.name for c in table.columns].index(name)  # type: ignore[attr-defined]
    return [row[index] for row in table.rows]  # type: ignore[attr-defined]


def test_the_worked_numbers() -> None:
    report = roofline.plan(SEVEN_B, [TWO_TB], phases([1, 32], 1024, 2048), Options())
    machines, steps = report.tables
    assert column(machines, "weight_read_limit") == [pytest.approx(142.857, abs=5e-4)]
    assert column(steps, "weight_intensity") == [1, 32, 2048]
    assert column(steps, "intensity") == [1, 32, 2048]
    assert column(steps, "binds") == ["bandwidth", "bandwidth", "compute"]
    text = "\n".join(report.as_text())
    assert "142.857" in text
    assert text.count("optimistic bound, not a measurement") >= 3
    assert "Ignored: activations' traffic" in text


def test_a_bound_by_hand() -> None:
    machine = Machine("m", "m", bandwidth=100, peaks={"f32": 1000}, compute="f32")
    small = BareWeights(50, 2)  # 100 bytes: a second of reading
    decode = roofline.bound(small, machine, Step("decode", 1, 0, 1), Options())
    assert (decode.compute, decode.memory, decode.seconds) == (0.1, 1.0, 1.0)
    assert decode.binds == "bandwidth"
    prefill = roofline.bound(small, machine, Step("prefill", 1, 0, 20), Options())
    assert (prefill.seconds, prefill.binds) == (2.0, "compute")
    unpacking = roofline.bound(
        small, machine, Step("prefill", 1, 0, 20), Options(dequantise=2, tile_rows=8)
    )
    assert unpacking.seconds == pytest.approx(2.0 + 2 * 50 * 3 / 1000)


def test_without_a_peak_only_bandwidth_binds() -> None:
    machine = Machine("given", "given", 2e12)
    report = roofline.plan(SEVEN_B, [machine], phases([1], 1024, 2048), Options())
    assert column(report.tables[0], "ridge") == [None]
    assert column(report.tables[1], "binds") == ["bandwidth", "bandwidth"]


def test_the_batch_from_which_compute_binds_reaches_the_ridge() -> None:
    assert roofline.compute_bound_from(SEVEN_B, 156) == 156
    assert roofline.compute_bound_from(SEVEN_B, 156.1) == 157
    mixtral = shape("mixtral-8x7b")  # every expert is read, two of eight compute
    fewest = roofline.compute_bound_from(mixtral, 156)
    assert fewest is not None
    assert fewest == pytest.approx(156 * 46.6 / 12.75, rel=0.01)
    for tokens, reached in ((fewest - 1, False), (fewest, True)):
        found = mixtral.step(Step("decode", tokens, 0, 1))
        assert (found.linear_flops / found.weight_bytes >= 156) == reached


def test_kv_is_read_by_each_sequence_and_weights_once() -> None:
    model = shape("llama-2-7b")
    one = model.step(Step("decode", 1, 1023, 1))
    many = model.step(Step("decode", 32, 1023, 1))
    assert one.kv_bytes == 524_288 * 1025  # 1,024 positions read, one written
    assert many.kv_bytes == 32 * one.kv_bytes
    assert many.weight_bytes - one.weight_bytes == 31 * 4096 * 2  # embedding rows
    assert one.attention_flops == 4 * 32 * 128 * 1024 * 32


def test_attention_alone_does_not_gain_from_the_batch() -> None:
    report = terms.plan(
        "attention", shape("llama-2-7b"), TWO_TB, phases([1, 64], 4096, 2048), Options()
    )
    assert report.value("decode_intensity") == 1
    one, many, _ = column(report.tables[0], "intensity")
    assert one == pytest.approx(many)
    assert one == pytest.approx(1, rel=1e-3)
    grouped = terms.plan(
        "attention", shape("llama-2-70b"), TWO_TB, phases([1], 4096, 2048), Options()
    )
    assert grouped.value("decode_intensity") == 8  # 64 query heads on 8 KV heads


def test_dequantisation_helps_decoding_and_not_prefill() -> None:
    config, _ = SHAPES["llama-2-7b"]
    model = ModelCosts(PlannedModel.of_shape("llama-2-7b", config, bits=4.5))
    a100 = hardware.find("a100-80gb")
    report = terms.plan(
        "dequantisation", model, a100, phases([1], 128, 2048), Options(dequantise=2)
    )
    assert report.value("bits") == pytest.approx(4.5)
    assert report.value("read_gain") == pytest.approx(16 / 4.5)
    decode, prefill = column(report.tables[0], "gain")
    assert 3 < decode < 16 / 4.5  # type: ignore[operator]
    assert prefill < 1  # type: ignore[operator]


def test_experts_alone() -> None:
    report = terms.plan(
        "experts", shape("mixtral-8x7b"), TWO_TB, phases([1, 8], 128, 512), Options()
    )
    one, eight, many = column(report.tables[0], "distinct_experts")
    assert one == 2
    assert eight == pytest.approx(8 * (1 - 0.75**8))
    assert many == pytest.approx(8)
    assert report.value("total_parameters") == 46_702_792_704
    assert report.value("active_parameters") < 13e9


def test_communication_by_hand() -> None:
    model = shape("llama-2-7b")
    step = Step("decode", 4, 1023, 1)
    sent, exchanges = roofline.exchanged_bytes(model, step, 4)
    assert exchanges == 64
    assert sent == 2 * 3 / 4 * 64 * 4 * 4096 * 2
    options = Options(devices=4, link=1e9, link_seconds=1e-5, kv_share=0.25)
    assert roofline.link_seconds(model, TWO_TB, step, options) == pytest.approx(sent / 1e9 + 64e-5)
    report = terms.plan("communication", model, TWO_TB, [step], options)
    assert column(report.tables[0], "share")[0] > 0  # type: ignore[operator]


@pytest.mark.parametrize("term", ["attention", "experts", "communication"])
def test_terms_that_need_layers_say_so(term: str) -> None:
    with pytest.raises(ConfigError, match="needs a MODEL"):
        terms.plan(term, SEVEN_B, TWO_TB, phases([1], 1, 1), Options(devices=2, link=1e9))


def test_terms_that_do_not_apply_say_so() -> None:
    steps = phases([1], 128, 128)
    with pytest.raises(ConfigError, match="has no experts"):
        terms.plan("experts", shape("llama-2-7b"), TWO_TB, steps, Options())
    with pytest.raises(ConfigError, match="--tensor-parallel 2 or more"):
        terms.plan("communication", shape("llama-2-7b"), TWO_TB, steps, Options())
    with pytest.raises(ConfigError, match="needs a peak"):
        terms.plan("dequantisation", SEVEN_B, Machine("m", "m", 1e9), steps, Options(dequantise=2))


def test_an_h100_gains_bandwidth_for_decoding_and_compute_for_prefill() -> None:
    a100, h100 = hardware.find("a100-80gb"), hardware.find("h100")
    model = shape("llama-2-7b")
    decode, prefill = phases([1], 1024, 2048)
    times = [
        [roofline.bound(model, machine, step, Options()).seconds for machine in (a100, h100)]
        for step in (decode, prefill)
    ]
    assert times[0][0] / times[0][1] == pytest.approx(3350 / 2039)
    assert times[1][0] / times[1][1] == pytest.approx(989.5 / 312)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.integers(1, 512),
    st.integers(1, 4096),
    st.integers(1, 4096),
)
def test_more_work_never_takes_less_time(name: str, batch: int, context: int, prompt: int) -> None:
    model, h100 = shape(name), hardware.find("h100")

    def least(batch: int, context: int, prompt: int) -> list[float]:
        steps = phases([batch], context, prompt)
        return [roofline.bound(model, h100, step, Options()).seconds for step in steps]

    base = least(batch, context, prompt)
    for more in (least(batch + 1, context, prompt), least(batch, context + 1, prompt + 1)):
        assert all(later >= first for later, first in zip(more, base, strict=True))


def test_every_figure_of_every_machine_has_a_public_source() -> None:
    raw = tomllib.loads(hardware.KNOWN_FILE.read_text(encoding="utf-8"))
    sources = raw.pop("sources")
    assert all(url.startswith("https://") for url in sources.values())
    assert {"a100-40gb", "a100-80gb", "h100", "h200", "l4", "t4", "epyc-7763"} <= set(raw)
    for name, machine in hardware.known_machines().items():
        figures = {"bandwidth", *(f"peak.{dtype}" for dtype in machine.peaks)}
        figures |= {key for key in ("memory", "link") if getattr(machine, key) is not None}
        assert set(machine.sources) == figures, name
        assert all(url in sources.values() for url in machine.sources.values()), name
        assert machine.compute in machine.peaks
        assert 10e9 < machine.bandwidth < 20e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "is not TOML"),
        ("[m]\ntitle = 'm'", "m has no bandwidth"),
        ("[m]\nbandwidth = 1e9", "expected \\[number, source\\]"),
        ("[m]\nbandwidth = [0, 'a']", "m.bandwidth is 0"),
        ("[m]\nbandwidth = [nan, 'a']", "m.bandwidth is nan"),
        ("[m]\nbandwith = [1e9, 'a']", "m.bandwith is not a field"),
        ("[m]\nbandwidth = [1e9, 'a']\npeak = 3", "m.peak is 3"),
        ("[a]\nbandwidth = [1e9, 'a']\n[b]\nbandwidth = [1e9, 'a']", "2 machines"),
    ],
)
def test_a_bad_hardware_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        hardware.find(str(path))


def test_a_hardware_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[mine]\nbandwidth = [1e9, 'a stopwatch']\npeak.f32 = [2e9, 'another']\n")
    machine = hardware.find(str(path))
    assert (machine.bandwidth, machine.peak(), machine.compute) == (1e9, 2e9, "f32")
    assert machine.sources["bandwidth"] == "a stopwatch"


def test_the_memory_of_a_machine_by_its_name() -> None:
    assert hardware.memory_bytes("--memory", "h100") == 80 * 10**9
    assert hardware.memory_bytes("--memory", "80GiB") == 80 * 2**30
    with pytest.raises(ConfigError, match=r"AMD EPYC 9654.* give a size"):
        hardware.memory_bytes("--memory", "epyc-9654")


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean h100"):
        hardware.find("h1000")
    with pytest.raises(ConfigError, match="--compute fp8: a100-80gb has no such peak"):
        hardware.find("a100-80gb").peak("fp8")


@pytest.mark.parametrize(
    ("text", "value"),
    [("2TB/s", 2e12), ("900GB/s", 9e11), ("1e11", 1e11), ("3.35TB/s", 3.35e12)],
)
def test_bandwidths_are_read(text: str, value: float) -> None:
    assert hardware.bytes_per_second("--bandwidth", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "2TBs", "fast", "", "1e300"])
def test_bad_rates_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--bandwidth"):
        hardware.bytes_per_second("--bandwidth", text)
    with pytest.raises(ConfigError, match="--peak"):
        hardware.flop_per_second("--peak", text)


@pytest.mark.parametrize(
    ("text", "value"), [("312TFLOP/s", 312e12), ("50 gflops", 5e10), ("1e13", 1e13)]
)
def test_peaks_are_read(text: str, value: float) -> None:
    assert hardware.flop_per_second("--peak", text) == pytest.approx(value)


def test_a_measured_machine_says_how() -> None:
    machine = hardware.measured("here", 1e10, {"int8": 2e11, "f32": 1e11}, "by a stopwatch")
    report = roofline.plan(SEVEN_B, [machine], phases([1], 1024, 2048), Options())
    assert column(report.tables[0], "ridge") == [20]
    assert "measure, bandwidth, peak: by a stopwatch" in report.notes


def test_the_plot_is_well_formed_and_needs_a_peak() -> None:
    model = shape("llama-2-7b")
    steps = phases([1, 32], 1024, 2048)
    machines = [hardware.find("a100-80gb"), hardware.find("h100")]
    root = ElementTree.fromstring(plot.picture(model, machines, steps, Options()).text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "NVIDIA H100 SXM 80 GB" in texts
    assert "prefill 2,048" in texts
    with pytest.raises(ConfigError, match="needs the peak"):
        plot.picture(model, [Machine("m", "m", 1e9)], steps, Options())


def test_experts_of_ones_own_replace_each_mlp() -> None:
    config, _ = SHAPES["llama-2-7b"]
    dense = PlannedModel.of_shape("x", config)
    mixed = PlannedModel.of_shape("x", config, Experts(4, 1))
    assert mixed.num_parameters > 2 * dense.num_parameters
