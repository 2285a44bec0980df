"""`poise verify quality` on a tiny model: table, record, exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poise.cli.main import run
from tiny_models import TinyModel, byte_tokens, write_gguf


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("POISE_HOME", str(tmp_path / "home"))
    tokens = ("tokenizer.ggml.tokens", [*byte_tokens(287), "ab"])  # what the one merge makes
    return str(write_gguf(tmp_path / "tiny.gguf", TinyModel(), "Q4_0", metadata=[tokens]))


def test_a_missed_target_is_exit_status_1(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", "quality", model, "--text", "prose", "--windows", "1", "--threads", "1"]
    out = tmp_path / "record.json"
    assert run([*arguments, "--max-kl", "1e-9", "--out", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "missed: prose: mean KL" in shown
    assert "not kept" in shown
    record = json.loads(out.read_text())
    assert record["texts"][0]["num_tokens"] == 256
    assert len(record["failures"]) >= 1
    assert not (tmp_path / "home" / "records").exists()
    assert run([*arguments, "--max-kl", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kl_target"] == 10


def test_a_limit_that_binds_no_text_is_refused(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", "quality", model, "--text", "dialogue", "--max-kl", "1"]) == 2
    assert "--max-kl judges prose and code only" in capsys.readouterr().err
