"""`poise verify` on the default model: the checks of the exact optimisations pass, and a fault in its engine is found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from poise.cli.main import run
from poise.optimisations import OPTIMISATIONS

EXACT = [entry for entry in OPTIMISATIONS if entry.kind == "exact"]


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = run(["verify", "smollm2-135m", "--quick", "--json", *arguments])
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, record


def test_each_exact_optimisation_changes_no_byte(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [word for entry in EXACT for word in entry.check.split()[2:]]
    status, record = verify(capsys, *checks, "--check", "twin")
    assert {check["name"] for check in record["checks"]} == {*checks[1::2], "twin"}
    for check in record["checks"]:
        assert check["status"] in ("same", "not here"), check
        assert all(check["fired"].values())
    assert record["passed"] is True
    assert status == 0


def test_a_fault_in_the_engine_of_this_model_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    status, record = verify(capsys, "--inject", "hash-without-parent", "--check", "cache")
    [check] = record["checks"]
    assert record["model"] == "smollm2-135m"
    assert check["status"] == "DIFFERENT"
    assert status == 1
