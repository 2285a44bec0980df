"""A thousand clients that hang up at random points leave the block pool exactly as it was."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)

PROMPTS = 1000


@pytest.fixture
def port(smollm2_path: Path) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
    server = subprocess.Popen(
        [
            *(sys.executable, "-c", "from poise.cli.main import main; main()", "serve"),
            *(str(smollm2_path), "--port", str(free), "--served-model-name", "m"),
            *("--kv-cache-memory-bytes", "64MiB"),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{free}/ready") as answer:
                    if answer.status == 200:
                        break
            except OSError:
                assert server.poll() is None
                signal.sigtimedwait([], 0.1)
        yield free
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()


def gauge(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def hang_up(port: int, rng: random.Random) -> None:
    """Connects, sends a request (or part of one), reads for a while, and closes without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {
            "model": "m",
            "prompt": [rng.randrange(1000, 40000) for _ in range(rng.choice([1, 15, 16, 40, 300]))],
            "max_tokens": rng.choice([1, 8, 400]),
            "n": rng.choice([1, 1, 1, 3]),
            "stream": rng.random() < 0.6,
            "temperature": 1,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    data = head.encode() + body
    point = rng.random()
    writer.write(data[: int(len(data) * point * 4)] if point < 0.25 else data)
    await writer.drain()
    try:
        async with asyncio.timeout(rng.choice([0, 0.01, 0.05, 0.2, 0.5])):
            while await reader.read(4096):
                pass
    except TimeoutError:
        pass
    if rng.random() < 0.5:
        writer.transport.abort()
    writer.close()


def test_a_thousand_disconnects_free_every_block(port: int) -> None:
    total = gauge(port, "poise_kv_blocks_total")
    assert gauge(port, "poise_kv_blocks_free") == total
    rng = random.Random(20261130)

    async def storm() -> None:
        gate = asyncio.Semaphore(24)

        async def one() -> None:
            async with gate:
                await hang_up(port, rng)

        await asyncio.gather(*(one() for _ in range(PROMPTS)))

    asyncio.run(storm())
    for _ in range(600):
        if (
            gauge(port, "vllm:num_requests_running")
            == gauge(port, "vllm:num_requests_waiting")
            == 0
        ):
            break
        signal.sigtimedwait([], 0.1)
    assert gauge(port, "vllm:num_requests_running") == 0
    assert gauge(port, "vllm:num_requests_waiting") == 0
    assert gauge(port, "poise_kv_blocks_free") == total
    assert gauge(port, "vllm:request_success_total") > 0
