"""`poise generate` on a small engine: text, JSON, standard input, Ctrl-C."""

from __future__ import annotations

import io
import json
import signal

import pytest
from cli_fake_engine import FakeEngine

from poise.cli.local_engine import printable
from poise.cli.main import run


def test_prints_the_continuation(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "The capital", "--max-tokens", "8", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == " Paris, France\n"
    assert engine.prompts == ["The capital"]
    assert engine.requests[0].params.max_tokens == 8
    assert engine.requests[0].params.greedy
    assert engine.closed


def test_json_holds_what_repeats_the_answer(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "Hi", "--seed", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "model": "fake-model",
        "text": " Paris, France",
        "prompt_token_ids": [72, 105],
        "token_ids": [0, 1, 2],
        "finish_reason": "stop",
        "seed": 7,
        "system_fingerprint": "fp_test",
    }


def test_a_drawn_seed_is_reported_and_used(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "Hi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == engine.requests[0].seed


def test_chat_wraps_the_prompt_as_a_message(engine: FakeEngine) -> None:
    assert run(["generate", "Hi", "--chat"]) == 0
    assert engine.prompts == ["<u>Hi"]


def test_a_dash_reads_standard_input(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert run(["generate", "-"]) == 0
    assert engine.prompts == ["from a pipe"]


def test_a_refused_prompt_is_one_line(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x" * 100]) == 2
    assert capsys.readouterr().err == "poise: the prompt is too long\n"
    assert engine.closed


def test_a_broken_answer_is_a_failure(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.finish_reason = "error"
    assert run(["generate", "Hi"]) == 1
    assert "the answer broke off" in capsys.readouterr().err


def test_ctrl_c_aborts_after_the_step(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    engine.on_step = lambda: signal.raise_signal(signal.SIGINT)
    assert run(["generate", "Hi"]) == 130
    assert capsys.readouterr().out == " Paris\n"
    assert len(engine.aborted) == 1
    assert engine.closed
    assert signal.getsignal(signal.SIGINT) is before


def test_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\n\x7f\x00é") == "a\N{REPLACEMENT CHARACTER}[2Jb\tc\n" + (
        "\N{REPLACEMENT CHARACTER}" * 2 + "é"
    )
