"""`poise chat` on a small engine: the conversation, multi-line messages, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from cli_fake_engine import FakeEngine

from poise.cli.chat import Conversation, read_message, run_session
from poise.core.sampling_params import SamplingParams


def typing(*events: str | BaseException) -> Callable[[str], str]:
    """Types these lines, raises these exceptions, then ends the input."""
    remaining = iter(events)

    def read(prompt: str) -> str:
        event = next(remaining, EOFError())
        if isinstance(event, BaseException):
            raise event
        return event

    return read


def session(engine: FakeEngine, *events: str | BaseException, system: str | None = None) -> None:
    params = SamplingParams(max_tokens=None)
    run_session(Conversation(engine, params, system), typing(*events))  # type: ignore[arg-type]


def test_a_conversation_grows(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    session(engine, "Hi", "And?")
    assert engine.prompts == ["<u>Hi", "<u>Hi<a> Paris, France<u>And?"]
    assert capsys.readouterr().out == " Paris, France\n" * 2


def test_the_system_message_comes_first(engine: FakeEngine) -> None:
    session(engine, "Hi", "/system be brief", "Hi", "/system", "Hi", system="be kind")
    assert engine.prompts == ["<s>be kind<u>Hi", "<s>be brief<u>Hi", "<u>Hi"]


def test_reset_forgets(engine: FakeEngine) -> None:
    session(engine, "Hi", "/reset", "Hi", system="S")
    assert engine.prompts == ["<s>S<u>Hi", "<s>S<u>Hi"]


def test_seed(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    session(engine, "/seed 5", "Hi", "/seed many", "/seed", "Hi")
    assert engine.requests[0].seed == 5
    assert engine.requests[1].params.seed is None
    assert "/seed many: expected a whole number" in capsys.readouterr().err


def test_an_unknown_command_is_not_sent(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    session(engine, "/halp")
    assert engine.requests == []
    assert "/halp is not a command" in capsys.readouterr().err


def test_help_names_each_command(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    session(engine, "/help")
    listing = capsys.readouterr().out
    for name in ("/help", "/reset", "/system", "/seed"):
        assert name in listing


def test_an_empty_line_is_no_message(engine: FakeEngine) -> None:
    session(engine, "", "   ")
    assert engine.requests == []


def test_ctrl_c_stops_the_answer_only(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.on_step = lambda: signal.raise_signal(signal.SIGINT)
    session(engine, "Hi", "Go on")
    assert len(engine.aborted) == 2
    assert engine.prompts[1] == "<u>Hi<a> Paris<u>Go on"
    assert "(stopped)" in capsys.readouterr().err


def test_ctrl_c_at_the_prompt_leaves_when_repeated(engine: FakeEngine) -> None:
    session(engine, KeyboardInterrupt(), "Hi", KeyboardInterrupt(), KeyboardInterrupt(), "never")
    assert engine.prompts == ["<u>Hi"]


def test_a_message_that_was_refused_is_not_remembered(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    session(engine, "x" * 100, "Hi")
    assert engine.prompts == ["<u>Hi"]
    assert capsys.readouterr().err == "poise: the prompt is too long\n"


def test_a_cut_answer_says_so(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.finish_reason = "length"
    session(engine, "Hi")
    assert "no room is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""', "def f():", "    pass", '"""'], "def f():\n    pass"),
        (['"""a', 'b"""'], "a\nb"),
        (['"""a"""'], "a"),
        (['  """', "  indented", '"""'], "  indented"),
    ],
)
def test_messages_of_several_lines(lines: list[str], message: str) -> None:
    assert read_message(typing(*lines)) == message
