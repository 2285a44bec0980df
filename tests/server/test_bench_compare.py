"""`poise bench compare` between mock servers that it starts: order, loads, record, interruption, a server that fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from poise.bench.paired_runs import read_comparison

POISE = [sys.executable, "-c", "from poise.cli.main import main; main()"]


def mock(tmp_path: Path, name: str, first_token_s: float) -> str:
    """Describes a mock server that is to be started; returns its TOML's path."""
    profile = tmp_path / f"{name}.json"
    profile.write_text(
        json.dumps({"schedules": [{"first_token_s": first_token_s, "gap_s": [0.001]}]})
    )
    words = [*POISE, "bench", "mock", "--port", "{port}", "--profile", str(profile)]
    path = tmp_path / f"{name}.toml"
    path.write_text(f'command = {json.dumps(words)}\nmodel = "mock"\nready_seconds = 60\n')
    return str(path)


def compare(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *POISE,
            "bench",
            "compare",
            *arguments,
            "--workload",
            "W2",
            "--output",
            str(folder / "r.json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def children(process: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def test_a_slower_server_is_told_from_the_faster_one(tmp_path: Path) -> None:
    fast, slow = mock(tmp_path, "fast", 0.03), mock(tmp_path, "slow", 0.06)
    process = compare(
        fast,
        slow,
        "--pairs",
        "6",
        "--null-pairs",
        "6",
        "--seed",
        "3",
        folder=tmp_path,
    )
    output, errors = process.communicate(timeout=120)
    comparison = read_comparison(tmp_path / "r.json")
    assert process.returncode == (0 if comparison.valid else 1), errors
    assert (comparison.a.name, comparison.b.name) == ("fast", "slow")
    assert [pair.first for pair in comparison.pairs] == ["A", "B"] * 3
    seeds = [pair.seed for pair in (*comparison.pairs, *comparison.null_pairs)]
    assert seeds == [*range(3, 15)]
    ttft = next(result for result in comparison.results if result.metric == "ttft_p50")
    if comparison.valid:  # else this machine was too busy to measure, and says so
        assert ttft.verdict == "worse"
        assert "ttft_p50: B is worse: +" in output
    else:
        assert "INVALID: " in output
    assert not list(tmp_path.glob("poise-bench-*"))


def test_one_server_at_an_address_is_not_answered_from_its_own_cache(tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps({"prefix_cache": True, "schedules": [{"first_token_s": 0.01}]}))
    words = [*POISE, "bench", "mock", "--port", "0", "--profile", str(profile)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            url = server.stdout.readline().split()[1].removesuffix("/v1;")
            process = compare(url, url, "--pairs", "1", "--null-pairs", "1", folder=tmp_path)
            _, errors = process.communicate(timeout=60)
        finally:
            server.kill()
    comparison = read_comparison(tmp_path / "r.json")
    (null,), (pair,) = comparison.null_pairs, comparison.pairs
    assert [null.a["cached_share"], null.b["cached_share"]] == [0.0, 0.0], errors
    assert [pair.a["cached_share"], pair.b["cached_share"]] == [0.0, 0.0]
    assert {result.verdict for result in comparison.results} == {"undecided"}


def test_an_interruption_keeps_the_pairs_and_ends_the_servers(tmp_path: Path) -> None:
    path = mock(tmp_path, "fast", 0.03)
    process = compare(path, path, folder=tmp_path)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("pair 1"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    comparison = read_comparison(tmp_path / "r.json")
    assert not comparison.valid
    assert comparison.stopped
    assert comparison.null_pairs
    assert "r.json" in errors
    assert not list(tmp_path.glob("poise-bench-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_that_dies_ends_the_comparison_in_words(tmp_path: Path) -> None:
    path = mock(tmp_path, "fast", 0.03)
    process = compare(path, path, folder=tmp_path)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("pair 1"):
        assert process.poll() is None
    for guard in children(process):
        os.kill(int(guard), signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(
        r"server fast ended with status -9; the pairs measured so far are in .*r\.json", errors
    )
    assert not read_comparison(tmp_path / "r.json").valid
    assert not output


def test_a_server_that_never_gets_ready(tmp_path: Path) -> None:
    path = tmp_path / "deaf.toml"
    words = [
        sys.executable,
        "-c",
        "import time; print('still loading', flush=True); time.sleep(60)",
    ]
    path.write_text(f'command = {json.dumps(words)}\nmodel = "m"\nready_seconds = 1\n')
    began = time.monotonic()
    process = compare(str(path), str(path), folder=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "  | still loading" in errors
    assert "server deaf was not ready within 1 s" in errors
    assert time.monotonic() - began < 60
    assert [entry.name for entry in tmp_path.iterdir()] == ["deaf.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody", "poise"], "no server named 'nobody'"),
        (["http://", "http://127.0.0.1:1"], "not an address"),
        (["http://127.0.0.1:1", "http://127.0.0.1:1"], "127.0.0.1"),
    ],
)
def test_wrong_servers_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    process = compare(*arguments, folder=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (1, 2)
    last = errors.splitlines()[-1]
    assert last.startswith("poise: ")
    assert message in last
