"""What `poise serve` prints before the first request, and `--explain`."""

from __future__ import annotations

import json
import logging
import shlex
import socket
from pathlib import Path

import pytest

from poise.cli.main import run
from poise.cli.serve import JSONFormatter, start_lines, url_of
from poise.config import flag_names, flags, resolve
from poise.engine.client import EngineInfo
from poise.optimisations import OPTIMISATIONS

DETAILS = {
    "format": "GGUF Q4_1",
    "weight_bytes": str(92 * 2**20),
    "kv_bytes": str(2**30),
    "kv_reason": "as asked",
    "threads": "2",
    "isa": "avx2",
}
INFO = EngineInfo("it's", 8192, 49152, 65_000, "fp", DETAILS)


def test_at_most_twelve_lines_that_say_what_is_served() -> None:
    lines = start_lines(INFO, resolve({}, {}), "http://127.0.0.1:8000")
    assert len(lines) <= 12
    text = "\n".join(lines)
    for fact in (
        "it's",
        "GGUF Q4_1, 92.0 MiB",
        "1.00 GiB (as asked)",
        "2 threads, avx2",
        "8,192",
        "65,000 tokens: 31 chats of 2,048",
        ":8000/v1",
    ):
        assert fact in text


def test_a_chat_is_never_longer_than_the_context() -> None:
    info = EngineInfo("m", 100, 10, 1000, "fp", DETAILS)
    assert "1,000 tokens: 10 chats of 100" in "\n".join(start_lines(info, resolve({}, {}), "u"))


def test_the_curl_line_survives_the_shell() -> None:
    settings = resolve({"api-key": ("secret",)}, {})
    words = shlex.split(start_lines(INFO, settings, "http://127.0.0.1:8000")[-1])
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert "secret" not in " ".join(words)


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")]
)
def test_the_url_works_on_this_machine(host: str, url: str) -> None:
    with socket.socket() as bound:
        bound.bind((host, 0))
        assert url_of(bound) == f"{url}{bound.getsockname()[1]}"


def test_json_log_lines_are_json() -> None:
    def record(name: str, message: str) -> logging.LogRecord:
        return logging.LogRecord(name, logging.INFO, "", 0, message, None, None)

    formatter = JSONFormatter()
    assert formatter.format(record("poise.requests", '{"id": 1}')) == '{"id": 1}'
    other = json.loads(formatter.format(record("poise.server", 'say "no"')))
    assert other == {"level": "info", "message": 'say "no"'}


def test_a_port_in_use_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poise.cli.serve.signal.signal", lambda number, handler: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["serve", "no-model-is-loaded", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"poise: port {port} on 127.0.0.1 is in use")
    assert error.count("\n") == 1


def test_explain_shows_each_setting_its_origin_and_the_optimisations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("POISE_HOME", str(tmp_path))
    monkeypatch.setenv("POISE_THREADS", "3")
    assert run(["serve", "--explain", "--port", "1234", "--api-key", "hunter2"]) == 0
    output = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in output.splitlines() if line.count("│") > 3}
    for flag in flags():
        assert f"--{flag.name}" in rows
    assert "1234" in rows["--port"]
    assert rows["--port"].count("--port") == 2
    assert "POISE_THREADS" in rows["--threads"]
    assert "default" in rows["--max-num-seqs"]
    assert "hunter2" not in output
    for entry in OPTIMISATIONS:
        assert entry.name in rows
        none_here = f"no evidence here: run {entry.check}" in rows[entry.name]
        assert none_here or (entry.kind == "lossy" and "evidence: KL " in rows[entry.name])


def test_help_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    listing = capsys.readouterr().out
    for name in flag_names():
        assert f"--{name}" in listing
