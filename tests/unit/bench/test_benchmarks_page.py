"""docs/BENCHMARKS.md is what the records give, and the page says what is in them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from poise.bench.compare import Pair
from poise.bench.paired_runs import Comparison, judge, write_comparison
from poise.bench.record import ServerInfo

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("benchmarks_page")


def test_the_page_is_up_to_date(pages: ModuleType) -> None:
    assert pages.PAGE.read_text(encoding="utf-8") == pages.page()


def run(server: str, workload: str, repetition: int, figure: float | None) -> dict[str, Any]:
    return {
        "server": server,
        "workload": workload,
        "repetition": repetition,
        "seed": repetition,
        "schedule_sha256": "",
        "valid": True,
        "reasons": [],
        "values": {
            "output_throughput": figure,
            "prompt_throughput": figure,
            "ttft_p50": 0.25,
            "tpot_p50": None,
        },
    }


def peers_record(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "created": "2026-11-30T07:00:00+00:00",
        "model": "some-model",
        "seed": 1,
        "rate": 1.5,
        "seconds": 30.0,
        "provenance": {"cpu": "A Processor", "physical_cores": 2, "poise": "0.1.0"},
        "servers": {
            "poise": {
                "command": ["python", "serve", "x.gguf"],
                "seconds_to_ready": 2.25,
            },
            "peer": {},
        },
        "runs": runs,
        "stopped": None,
    }


def test_figures_ratios_and_what_was_left_out(pages: ModuleType, tmp_path: Path) -> None:
    runs = [run("poise", "W3", i, figure) for i, figure in enumerate([700.0, 600.0, 650.0])]
    runs += [run("peer", "W3", i, figure) for i, figure in enumerate([325.0, 300.4, 400.0])]
    runs.append(run("peer", "W2", 0, 9000.0) | {"valid": False, "reasons": ["dispatch lag: late"]})
    (tmp_path / "peers-1.json").write_text(json.dumps(peers_record(runs)))
    text = pages.page(tmp_path)
    assert "| W3 mixed batch, output tok/s | 650 (600–700) | 325 (300–400) | 2.00 |" in text
    assert "| W3 | poise | 250 (250–250) | – | – |" in text
    assert "- W2 on peer, repetition 1: dispatch lag: late" in text
    assert "9,000" not in text
    assert "- poise, ready after 2.2 s: `python serve x.gguf`" in text
    assert "/home/me" not in text
    assert "- peer: ran already." in text
    assert "W1 single" not in text
    assert text == pages.page(tmp_path)


def test_a_comparison_shows_its_words(pages: ModuleType, tmp_path: Path) -> None:
    a, b = (ServerInfo(name, "http://127.0.0.1:1", "/v1/completions", "m") for name in "ab")
    comparison = Comparison("2026-11-30T07:00:00", a, b, {"name": "W3"}, {}, 1, {})
    wobble = [100.0, 101.0]
    comparison.null_pairs = [
        Pair(i, "", "A", {"output_throughput": wobble[i % 2]}, {"output_throughput": 100.4})
        for i in range(10)
    ]
    comparison.pairs = [
        Pair(i, "", "A", {"output_throughput": wobble[i % 2]}, {"output_throughput": 80.0})
        for i in range(10)
    ]
    judge(comparison)
    write_comparison(comparison, tmp_path / "compare-1.json")
    text = pages.page(tmp_path)
    assert "## b (B) against a (A), 2026-11-30" in text
    assert "- output_throughput: B is worse: -20.4 %" in text
    assert "Invalid" not in text
    comparison.stopped = "the server is gone"
    judge(comparison)
    write_comparison(comparison, tmp_path / "compare-1.json")
    assert "**Invalid:** the server is gone" in pages.page(tmp_path)


def test_no_records(pages: ModuleType, tmp_path: Path) -> None:
    assert pages.page(tmp_path).endswith("There is no record yet.\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.12345, "0.123"), (1.0, "1.00"), (99.94, "99.9"), (12345.6, "12,346")],
)
def test_numbers(pages: ModuleType, value: float, text: str) -> None:
    assert pages.number(value) == text


def test_each_processor_keeps_its_latest_records(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record on one machine hides none of another machine's, and none with a shape of its own."""
    of_kernels = importlib.import_module("kernel_sections")
    monkeypatch.setattr(of_kernels, "KINDS", [("models-*.json", "Models", lambda record: iter(()))])
    records = [("old", "A", "ab"), ("other", "B", "ab"), ("third", "A", "c"), ("new", "A", "ab")]
    for number, (_, cpu, shapes) in enumerate(records):
        provenance = {"cpu": cpu, "physical_cores": 2, "isa": "avx2"}
        record = {
            "created": "2026-12-01",
            "provenance": provenance,
            "shapes": dict.fromkeys(shapes),
        }
        (tmp_path / f"models-{number}.json").write_text(json.dumps(record))
    shown = [section.partition("record [")[2][:8] for section in of_kernels.sections(tmp_path)]
    assert shown == ["models-3", "models-2", "models-1"]
