"""What `poise serve` says of settings that choose formulas: at start-up and with `--explain`."""

from __future__ import annotations

import pytest

from poise.cli.main import run
from poise.cli.serve import start_lines
from poise.config import resolve
from poise.engine.client import EngineInfo

DETAILS = {
    "format": "GGUF Q4_1",
    "weight_bytes": "1",
    "kv_bytes": str(2**30),
    "kv_reason": "as asked",
    "threads": "2",
    "isa": "avx2",
}
INFO = EngineInfo("m", 8192, 49152, 65_000, "fp", DETAILS)


def test_start_lines_name_what_is_not_the_default() -> None:
    usual = "\n".join(start_lines(INFO, resolve({}, {}), "u"))
    assert "activations" not in usual
    assert "int8" not in usual
    other = "\n".join(start_lines(INFO, resolve({"activations": "bf16"}, {}), "u"))
    assert "2 threads, avx2, bf16 activations" in other
    int8 = "\n".join(start_lines(INFO, resolve({"kv-cache-dtype": "int8"}, {}), "u"))
    assert "1.00 GiB (as asked), int8" in int8


def test_explain_shows_the_way_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")

    def entry(name: str, *flags: str) -> str:
        assert run(["serve", "--explain", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if name in line)

    assert "on for integer weights" in entry("quantised activations")
    assert "--activations bf16" in entry("quantised activations")
    assert "│ off" in entry("quantised activations", "--activations", "bf16")
    usual = entry("int8 KV cache")
    assert "│ off" in usual
    assert "lossy" in usual
    assert "no evidence here: run poise verify quality --kv-cache-dtype int8" in usual
    assert "│ on" in entry("int8 KV cache", "--kv-cache-dtype", "int8")
    assert "--kv-cache-dtype bf16" in usual
