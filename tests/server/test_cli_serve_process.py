"""`poise serve` as a process: what it prints, its curl line, its log, and its end."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

POISE = [sys.executable, "-c", "from poise.cli.main import main; main()"]
SECRET = "a word that must not be logged: xylophone"


class Server:
    """A running `poise serve`, once it has printed its last start line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*POISE, "serve", "--port", "0", "--kv-cache-memory-bytes", "64MiB", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines = list(lines_until(self.process.stdout, "curl "))

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        """Exit status and everything on standard error."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def lines_until(stream: IO[str], begin: str) -> Iterator[str]:
    for line in stream:
        yield line.rstrip("\n")
        if line.startswith(begin):
            return
    raise AssertionError(f"the output ended without a line that begins with {begin!r}")


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_printed_curl_line_works_as_pasted(server: Server) -> None:
    output = subprocess.run(
        ["sh", "-c", server.lines[-1]], capture_output=True, text=True, check=True
    ).stdout
    answer = json.loads(output)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_start_is_at_most_twelve_lines_that_say_what_is_served(server: Server) -> None:
    assert len(server.lines) <= 12
    text = "\n".join(server.lines)
    for fact in ("smollm2-135m", "GGUF Q4_1", "8,192", "chats of 2,048", "threads", "http://127."):
        assert fact in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0(server: Server, number: signal.Signals) -> None:
    status, errors = server.stop(number)
    assert status == 0, errors
    assert "Traceback" not in errors


def test_one_log_line_per_request_and_never_the_prompt(server: Server) -> None:
    from openai import OpenAI

    url = next(word for line in server.lines for word in line.split() if word.endswith("/v1"))
    client = OpenAI(base_url=url, api_key="none")
    client.completions.create(model="smollm2-135m", prompt=SECRET, max_tokens=3, temperature=0)
    status, errors = server.stop(signal.SIGTERM)
    assert status == 0
    [line] = [line for line in errors.splitlines() if "out=3" in line]
    assert "finish=length" in line
    assert "xylophone" not in errors


def test_a_port_in_use_is_one_line_before_the_model_is_loaded(server: Server) -> None:
    url = next(word for line in server.lines for word in line.split() if word.endswith("/v1"))
    port = url.split(":")[-1].removesuffix("/v1")
    second = subprocess.run(
        [*POISE, "serve", "no-such-model", "--port", port], capture_output=True, text=True
    )
    assert second.returncode == 2
    assert second.stderr.startswith(f"poise: port {port} on 127.0.0.1 is in use")
