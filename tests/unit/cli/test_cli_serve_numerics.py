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
    other = "\n".join(start_lines(INFO, resolve({"activations": "bf16"}, {}), "u"))
    assert "2 threads, avx2, bf16 activations" in other


def test_explain_shows_the_way_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")

    def entry(*flags: str) -> str:
        assert run(["serve", "--explain", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if "quantised activations" in line)

    assert "on for integer weights" in entry()
    assert "--activations bf16" in entry()
    assert "│ off" in entry("--activations", "bf16")
