"""Exit statuses, one-line errors, help and version."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from poise import __version__
from poise.cli import main
from poise.errors import ConfigError, EngineDeadError, InvalidRequestError, PullError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"poise {__version__}\n"


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    listing = capsys.readouterr().out
    for verb in main.VERBS:
        assert f"\n  {verb} " in listing


@pytest.mark.parametrize("verb", main.VERBS)
def test_each_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([verb, "--help"]) == 0
    assert f"Usage: poise {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["srve"], "poise: No such command 'srve'."),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "x"], "poise: --port: 'x' is not valid: expected a whole number"),
        (["serve", "a", "--model", "b"], "poise: two models: 'a' and --model 'b'; give one"),
        (["serve", "--config", "absent.toml"], "absent.toml"),
        (["inspect", "no-such-model"], "no-such-model"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["pull", "no-such-model"], "no-such-model"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("poise: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (PullError("no network\nat all"), 1),
        (EngineDeadError("dead"), 1),
        (ConfigError("wrong"), 2),
        (InvalidRequestError("wrong"), 2),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
    ],
)
def test_errors_become_a_status(
    error: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(main.group, "main", fail)
    assert main.run(["env"]) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == (0 if status == 130 else 1)


def test_windows_gets_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main.run(["serve"]) == 1
    assert capsys.readouterr().err.startswith("poise: Windows is not supported")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from poise.cli.main import run; run(['--help']);"
        "print(sorted({'numpy', 'rich', 'starlette', 'uvicorn', 'tokenizers'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.splitlines()[-1] == "[]"
