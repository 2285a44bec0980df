"""`poise serve --tenants` as a process: keys, what is shared through a real model's cache, a reload, `poise why`."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_cli_serve_process import POISE, Server

SYSTEM = (
    "You are the harbour master of a small town. Answer in one sentence, kindly, and never name a ship. "
    * 3
)
QUESTION = "Which ships came in this morning, and what did they carry? Tell me about each of them in turn, please."


@dataclass
class Town:
    server: Server
    path: Path
    keys: dict[str, str]

    @property
    def url(self) -> str:
        words = " ".join(self.server.lines).split()
        return next(word for word in words if word.endswith("/v1")).removesuffix("/v1")

    def ask(self, name: str, question: str = QUESTION, **fields: Any) -> httpx.Response:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, **fields}
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def new_key(tenant: str) -> tuple[str, str]:
    """The key, and the TOML to keep."""
    printed = subprocess.run(
        [*POISE, "key", "new", tenant], capture_output=True, text=True, check=True
    ).stdout
    comment, _, toml = printed.partition("\n")
    return comment.split()[-1], toml


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("tenants")
    made = {name: new_key(name) for name in ("acme", "bolt")}
    path, public = folder / "tenants.toml", folder / "system.txt"
    path.write_text("".join(toml for _, toml in made.values()))
    public.write_text(SYSTEM + "\n")
    server = Server("--tenants", str(path), "--public-prefix", str(public))
    yield Town(server, path, {name: key for name, (key, _) in made.items()})
    server.process.kill()
    server.process.communicate()


def test_only_the_public_prefix_is_shared_and_the_answers_are_the_same(town: Town) -> None:
    assert any(line.startswith("tenants      2, ") for line in town.server.lines)
    assert len(town.server.lines) <= 12
    first, stranger, again = town.ask("acme"), town.ask("bolt"), town.ask("acme")
    cached = [
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for answer in (first, stranger, again)
    ]
    num_prompt_tokens = first.json()["usage"]["prompt_tokens"]
    assert cached[0] == 0
    assert 40 < cached[1] < num_prompt_tokens - 20
    assert cached[2] == (num_prompt_tokens - 1) // 16 * 16
    texts = {
        answer.json()["choices"][0]["message"]["content"] for answer in (first, stranger, again)
    }
    assert len(texts) == 1


def test_why_is_for_the_same_tenant(town: Town) -> None:
    ours = town.ask("acme").json()["id"]
    arguments = [*POISE, "why", ours, "--url", town.url, "--api-key"]
    told = subprocess.run([*arguments, town.keys["acme"]], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "ended by length" in " ".join(told.stdout.split())
    refused = subprocess.run([*arguments, town.keys["bolt"]], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "There is no request" in refused.stderr


def test_a_key_that_is_taken_out_stops_working_without_a_restart(town: Town) -> None:
    assert town.ask("bolt").status_code == 200
    key, toml = new_key("acme")
    town.path.write_text(toml)
    town.server.process.send_signal(signal.SIGHUP)
    assert town.server.process.stderr is not None
    for line in town.server.process.stderr:
        if "1 tenants read" in line:
            break
    assert town.ask("bolt").status_code == 401
    assert town.ask("acme").status_code == 401
    town.keys["acme"] = key
    assert town.ask("acme").status_code == 200


def test_a_faulty_file_ends_the_start_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenants.acme]\nwieght = 1\n")
    started = subprocess.run(
        [*POISE, "serve", "no-such-model", "--tenants", str(path)], capture_output=True, text=True
    )
    assert started.returncode == 2
    assert started.stderr.startswith(f"poise: {path}, line 2: tenants.acme.wieght is not a setting")
