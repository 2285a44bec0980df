"""`poise profile` on a real model and on a running server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poise.cli.main import run


def test_profile_of_a_model_in_this_process(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["profile", "smollm2-135m", "--concurrency", "2", "--prompt-tokens", "8"]
    assert run([*arguments, "--output-tokens", "3", "--json", "--trace", str(trace)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["steps"] == 3
    assert figures["rows"] == 2 * 8 + 2 * 2
    assert figures["logit_rows"] == 6
    assert figures["operations"]["attention"]["operations"] == 30
    assert figures["machine"]["read_bytes_per_second"] > 0
    assert (figures["counters"] is None) == (figures["counters_refused"] is not None)
    assert len(json.loads(trace.read_text())["traceEvents"]) > 3 * 150


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "--url", "http://127.0.0.1:9", "--seconds", "0.1"]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
