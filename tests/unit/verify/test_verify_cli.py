"""`poise verify` as a user sees it: table, JSON, exit status, errors."""

from __future__ import annotations

import json

import pytest

from poise.cli.main import run
from poise.verify.faults import FAULTS


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["verify", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = verify(capsys, "--list-faults")
    assert status == 0
    for fault in FAULTS:
        assert fault.name.partition("-")[0] in out


def test_a_fault_fails_the_run_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = verify(
        capsys,
        "--quick",
        "--inject",
        "shared-random-stream",
        "--check",
        "order",
        "--check",
        "repeat",
    )
    assert status == 1
    assert "DIFFERENT" in out
    assert "first difference" in out
    assert "smallest case found" in out
    assert "caught by the check named for it, order" in out


def test_json_holds_what_is_needed_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = verify(
        capsys, "--quick", "--json", "--inject", "shared-random-stream", "--check", "order"
    )
    record = json.loads(out)
    assert status == 1
    assert record["fault"] == "shared-random-stream"
    assert record["passed"] is False
    [check] = record["checks"]
    assert check["status"] == "DIFFERENT"
    assert check["fired"]["requests in another place"] > 0
    requests = check["reproduction"]["requests"]
    assert check["reproduction"]["differing"] in [request["name"] for request in requests]
    assert len(requests) == 2  # one neighbour before it is enough
    assert all(request["prompt"] and "seed" in request for request in requests)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--inject", "nothing"), "there is no fault 'nothing'; known: sum-order"),
        (("--check", "speed"), "--check speed: no such check; known: repeat"),
        (("--against", "no-such-file.json"), "--against no-such-file.json: No such file"),
        (("--threads", "none"), "--threads"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = verify(capsys, "--quick", *arguments)
    assert status == 2
    assert message in err
    assert not out


def test_help_names_the_other_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = verify(capsys, "--help")
    assert status == 0
    assert "--inject" in out
    assert "faults" in out
