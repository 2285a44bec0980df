"""`poise plan`: every worked number through the command line, JSON beside text, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poise.cli.main import run
from tiny_models import TinyModel, write_gguf, write_safetensors_folder

RAW_KV = ["--layers", "32", "--kv-heads", "32", "--head-dim", "128"]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `poise plan …` and returns what it printed."""

    def call(*arguments: str) -> str:
        assert run(["plan", *arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


def figures(text: str) -> dict[str, tuple[object, str]]:
    return {
        name: (figure["value"], figure["unit"])
        for name, figure in json.loads(text)["figures"].items()
    }


def test_kv_of_a_raw_shape(answer: Any) -> None:
    text = answer("kv", *RAW_KV, "--tokens", "2048", "--sequences", "40")
    assert "KV of a token" in text
    assert "524,288 B/token = 512 KiB/token = 524.288 kB/token" in text
    assert "1,073,741,824 B/sequence = 1 GiB/sequence = 1.07374 GB/sequence" in text
    assert "42,949,672,960 B = 40 GiB = 42.9497 GB" in text
    long = figures(answer("kv", *RAW_KV, "--tokens", "32768", "--json"))
    assert long["kv_bytes_per_sequence"] == (16 * 2**30, "B/sequence")


def test_kv_of_a_known_shape_and_its_memory(answer: Any) -> None:
    found = figures(answer("kv", "llama-2-7b", "--sequences", "40", "--memory", "80GB", "--json"))
    assert found["kv_bytes_per_token"] == (524_288, "B/token")
    assert found["weight_bytes"] == (2 * 6_738_415_616, "B")
    assert found["most_sequences"][1] == "sequences"
    assert found["longest_context"][1] == "tokens/sequence"


def test_kv_of_a_file(answer: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TinyModel(), "Q8_0")
    found = figures(answer("kv", str(path), "--tokens", "100", "--json"))
    assert found["kv_bytes_per_token"] == (2 * 2 * 2 * 16 * 2, "B/token")
    assert found["weight_bytes"][1] == "B"


def test_kv_of_a_model_with_windows_and_inspect_in_the_same_words(
    answer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TinyModel(architecture="gemma3", num_layers=6, window_period=3, sliding_window=40)
    folder = write_safetensors_folder(tmp_path / "tiny", model)
    text = answer("kv", str(folder))
    assert "sliding window of 40" in text
    assert run(["inspect", str(folder)]) == 0
    inspected = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for label in ("weights ", "KV of a token ", "KV of 512 tokens "):
        [line] = [line for line in inspected.splitlines() if line.startswith(label)]
        assert " ".join(line.split()) in lines


def test_kv_of_a_config_alone(answer: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TinyModel().config_json()))
    found = figures(answer("kv", str(path), "--json"))
    assert found["kv_bytes_per_token"] == (256, "B/token")


def test_explain_shows_equations(answer: Any) -> None:
    text = answer("kv", *RAW_KV, "--explain")
    assert "= 2 (K and V) · layers · KV heads · head_dim · bytes = 2 · 32 · 32 · 128 · 2" in text


def test_the_weight_read_limit(answer: Any) -> None:
    text = answer("roofline", "--parameters", "7e9", "--bandwidth", "2TB/s", "--peak", "312TFLOP/s")
    assert "142.857" in text
    steps = json.loads(
        answer("roofline", "--parameters", "7e9", "--hardware", "a100-80gb", "--json")
    )["tables"]["steps"]
    assert [row["weight_intensity"] for row in steps["rows"]] == [1, 32, 2048]
    assert steps["units"]["weight_intensity"] == "FLOP/B"


@pytest.mark.parametrize("term", ["attention", "dequantisation", "experts", "communication"])
def test_each_term_alone(answer: Any, term: str) -> None:
    text = answer(
        "roofline", "mixtral-8x7b", "--hardware", "h100", "--tensor-parallel", "2", "--term", term
    )
    assert text.startswith(f"{term} of mixtral-8x7b on NVIDIA H100")
    assert "optimistic bound, not a measurement" in text


def test_several_machines_side_by_side(answer: Any) -> None:
    text = answer("roofline", "llama-2-7b", "--hardware", "a100-80gb,h100")
    assert "machine    phase" in text
    assert "h100, bandwidth, peak: https://www.nvidia.com" in text


def test_schedule_draws_and_counts(answer: Any, tmp_path: Path) -> None:
    svg = tmp_path / "gantt.svg"
    text = answer("schedule", "--lengths", "5,20,10,15,10", "--slots", "3", "--svg", str(svg))
    assert "35 iterations" in text
    assert "20 iterations" in text
    assert "slot 1 |AAAAADDDDDDDDDDDDDDD|" in text
    assert "no prefill" in text
    assert svg.read_text().startswith("<svg")
    equal = figures(answer("schedule", "--lengths", "5,5,5,5,5,5", "--slots", "3", "--json"))
    assert equal["static_iterations"] == equal["continuous_iterations"] == (10, "iterations")
    none = figures(answer("schedule", "--lengths", "", "--slots", "3", "--json"))
    assert none["static_iterations"] == none["continuous_iterations"] == (0, "iterations")


def test_speculation_of_two_distributions(answer: Any) -> None:
    found = figures(answer("speculation", "--p", ".2,.5,.3", "--q", ".6,.3,.1", "--json"))
    assert found["accepted_mass"] == (pytest.approx(60), "%")
    assert found["accept_all_error"] == (pytest.approx(40), "%")


def test_compose_refuses_24(answer: Any) -> None:
    text = answer("compose", "4x", "40%", "2x", "1.5x", "--claimed", "24x")
    assert "no: more than 20×" in text
    assert "No share is given" in text


def test_little_of_numbers(answer: Any) -> None:
    assert "10 requests" in answer("little", "--rate", "5", "--latency", "2")


def test_little_of_a_record(answer: Any, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(record(in_flight=4.0, rate=2.0, latency=1.9)))
    found = figures(answer("little", str(path), "--json"))
    assert found["by_law"] == (pytest.approx(3.8), "requests")
    assert found["difference"] == (pytest.approx(-5), "%")
    failed = {"name": "answered", "verdict": "fail", "reason": "1 of 20 requests failed"}
    invalid = record(in_flight=4.0, rate=2.0, latency=1.9) | {"valid": False, "gates": [failed]}
    path.write_text(json.dumps(invalid))
    assert "not valid (answered: 1 of 20 requests failed)" in answer("little", str(path))
    path.write_text(json.dumps(record(in_flight=4.0, rate=0.0, latency=None)))
    assert run(["plan", "little", str(path)]) == 2
    assert "has no rate and no latency: nothing was answered" in capsys.readouterr().err


def record(in_flight: float, rate: float, latency: float | None) -> dict[str, object]:
    """The least that makes a record of `poise bench`."""

    def figure(value: float, unit: str) -> dict[str, object]:
        return {"definition": "", "unit": unit, "value": value}

    window = {
        "begin": 0.0,
        "end": 10.0,
        "num_offered": 20,
        "distributions": {
            "e2el_from_send": {
                "definition": "", "unit": "s", "n": 20, "mean": latency,
                "minimum": None, "maximum": None, "percentiles": [],
            }
        },
        "figures": {
            "mean_in_flight": figure(in_flight, "requests"),
            "request_throughput": figure(rate, "req/s"),
        },
    }  # fmt: skip
    return {
        "created": "2026-01-01T00:00:00Z",
        "server": {"name": "a", "base_url": "http://a", "endpoint": "/v1", "model": "m"},
        "schedule": {
            "sha256": "0", "seed": 0, "num_requests": 20, "workload": {}, "arrivals": {},
        },
        "client": {},
        "provenance": {},
        "duration_s": 10.0,
        "summary": {"full": window},
        "steady_note": "",
        "gates": [],
        "valid": True,
        "schema": "poise.bench.run/1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kv"], "give MODEL, or --layers, --kv-heads, --head-dim too"),
        (["kv", *RAW_KV[:4]], "give MODEL, or --head-dim too"),
        (["kv", *RAW_KV, "--tokens", "0"], "--tokens is '0'"),
        (["kv", *RAW_KV, "--tokens", "1e30"], "--tokens is '1e30'"),
        (["kv", *RAW_KV, "--sequences", "-4"], "--sequences is '-4'"),
        (["kv", *RAW_KV, "--tokens", "nan"], "--tokens is 'nan'"),
        (["kv", *RAW_KV, "--kv-dtype", "bf8"], "--kv-dtype is 'bf8'"),
        (["kv", *RAW_KV, "--memory", "lots"], "--memory is 'lots'"),
        (["kv", *RAW_KV, "--sliding-layers", "4"], "--sliding-layers and --window belong together"),
        (["kv", *RAW_KV, "--sliding-layers", "40", "--window", "9"], "--sliding-layers is '40'"),
        (["kv", *RAW_KV, "--shared-layers", "32"], "--shared-layers is '32'"),
        (["kv", "llama-2-70b", "--kv-heads", "64"], "is the number of query heads of llama-2-70b; it has 8 KV heads"),
        (["kv", "llama-2-70b", "--window", "64"], "MODEL says that itself"),
        (["kv", "no-such-model", "--offline"], "known shapes: llama-2-70b, llama-2-7b,"),
        (["roofline", "--hardware", "h100"], "give MODEL or --parameters"),
        (["roofline", "llama-2-7b"], "give --hardware NAME"),
        (["roofline", "llama-2-7b", "--hardware", "h10"], "did you mean h100"),
        (["roofline", "--parameters", "0", "--hardware", "h100"], "--parameters is '0'"),
        (["roofline", "--parameters", "7e9", "--hardware", "h100", "--batch", "0"], "--batch is '0'"),
        (["roofline", "llama-2-7b", "--hardware", "l4", "--tensor-parallel", "2"], "l4 has no link"),
        (["roofline", "llama-2-7b", "--hardware", "h100", "--tensor-parallel", "3"], "does not divide"),
        (["roofline", "llama-2-7b", "--hardware", "h100", "--experts", "2,8"], "--experts is '2,8'"),
        (["roofline", "llama-2-7b", "--hardware", "h100,l4", "--term", "attention"], "shown for one machine"),
        (["schedule", "--lengths", "5", "--slots", "0"], "--slots is '0'"),
        (["schedule", "--lengths", "-5", "--slots", "1"], "--lengths is '-5'"),
        (["speculation"], "give --acceptance"),
        (["speculation", "--acceptance", "70"], "--acceptance is '70'"),
        (["compose", "fast"], "'fast' is not a claim"),
        (["little", "--rate", "5"], "give two of"),
        (["little", "absent.json"], "absent.json"),
        (["schedule", "--lengths", "5", "--slots", "1", "--svg", "/no/such/folder/a.svg"], "--svg /no/such/folder/a.svg"),
    ],
)  # fmt: skip
def test_nonsense_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
