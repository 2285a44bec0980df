"""Binding a port, and how a server process ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from poise.errors import ConfigError
from poise.server import bind_socket

HERE = Path(__file__).parent

SERVER = """
import asyncio, sys
from fake_server_engine import FakeEngine, fake_app
from poise.server import bind_socket, run_server

async def make_app():
    if "slow" in sys.argv:
        print(port, flush=True)
        await asyncio.sleep(60)
    if "broken" in sys.argv:
        raise RuntimeError("no such model")
    if "late" in sys.argv:
        print(port, flush=True)
        await asyncio.sleep(1)
    engine = FakeEngine(pace=lambda: asyncio.sleep(0.02), max_model_len=9000)
    return fake_app(engine)

bound = bind_socket("127.0.0.1", 0)
port = bound.getsockname()[1]
run_server(make_app, bound, shutdown_timeout=float(sys.argv[1]), on_started=lambda: print(port, flush=True))
print("ended", flush=True)
"""


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server process and the first line it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert out == "ended\n"
    assert "Traceback" not in err, err


def open_stream(port: str, max_tokens: int) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
    body = json.dumps({"prompt": "a", "stream": True, "max_tokens": max_tokens})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.readline()
    return response


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_aborts_what_runs_and_ends_with_status_0(number: signal.Signals) -> None:
    process, port = start("0")
    response = open_stream(port, 8000)
    process.send_signal(number)
    rest = response.read().decode()
    assert '"finish_reason":"abort"' in rest
    assert rest.endswith("data: [DONE]\n\n")
    finish(process)


def test_answers_may_finish_within_the_timeout() -> None:
    process, port = start("15")
    response = open_stream(port, 20)
    process.send_signal(signal.SIGTERM)
    rest = response.read().decode()
    assert '"finish_reason":"length"' in rest
    finish(process)


def test_a_second_signal_does_not_wait() -> None:
    process, port = start("60")
    response = open_stream(port, 8000)
    process.send_signal(signal.SIGTERM)
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
    connection.request("GET", "/ready")
    answer = connection.getresponse()
    assert answer.status == 503
    assert "draining" in answer.read().decode()
    connection.close()
    process.send_signal(signal.SIGINT)
    response.read()
    finish(process)


def get(port: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_server_that_loads_says_so_and_ends_with_status_0() -> None:
    process, port = start("0", "slow")
    assert get(port, "/health") == (200, '{"status":"alive"}')
    status, body = get(port, "/ready")
    assert status == 503
    assert "loading" in body
    process.send_signal(signal.SIGTERM)
    finish(process)


def test_a_request_that_comes_while_the_model_loads_is_served() -> None:
    process, port = start("0", "late")
    assert '"finish_reason":"length"' in open_stream(port, 3).read().decode()
    assert get(port, "/ready")[0] == 200
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out.endswith("ended\n")
    assert process.returncode == 0


def test_a_model_that_cannot_be_loaded_is_the_error_of_run_server() -> None:
    process, line = start("0", "broken")
    assert line == ""
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.rstrip().endswith("RuntimeError: no such model")


def test_port_in_use_is_one_line() -> None:
    with bind_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            bind_socket("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 70_000, "port is 70000"),
        ("127.0.0.1", -1, "port is -1"),
        ("no such host", 0, "can't be resolved"),
        ("192.0.2.1", 0, "isn't an address of this machine"),
    ],
)
def test_bad_addresses(host: str, port: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        bind_socket(host, port)
    assert "\n" not in str(caught.value)


def test_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError, match="no permission to listen on port 80"):
        bind_socket("127.0.0.1", 80)


def test_ipv6() -> None:
    try:
        bound = bind_socket("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    assert bound.family == socket.AF_INET6
    bound.close()
