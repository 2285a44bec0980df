"""The proof of the proof: without a fault all checks pass, each fault is found by the check named for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from poise.config import resolve
from poise.kernels.cpu import available_isas
from poise.verify.checks import CHECKS, checks_named
from poise.verify.faults import FAULTS, WITHOUT_FAULT, Fault, fault_named
from poise.verify.matrix import BEGIN, END, escaped, markdown, replace_matrix, run_matrix
from poise.verify.proof import Proof, prove
from poise.verify.trials import DIFFERENT, NOT_HERE, SAME

PAGE = (Path(__file__).parents[3] / "docs/EXACTNESS.md").read_text(encoding="utf-8")


def tiny_proof(fault: Fault | None, *checks: str, **given: object) -> Proof:
    chosen = checks_named(checks)
    settings = resolve(given, {})
    return prove(settings, quick=True, checks=chosen, fault=fault, tiny=True, shrink=False)


@pytest.mark.parametrize(("block_size", "kv"), [("16", "bf16"), ("64", "bf16"), ("32", "int8")])
def test_without_a_fault_all_is_the_same(block_size: str, kv: str) -> None:
    proof = tiny_proof(None, **{"block-size": block_size, "kv-cache-dtype": kv})
    assert proof.info.details["kv_dtype"] == kv
    assert {o.name: o.status for o in proof.outcomes if o.status not in (SAME, NOT_HERE)} == {}
    assert all(outcome.num_answers for outcome in proof.outcomes)


def test_what_is_switched_off_is_not_proved() -> None:
    for setting in ("true", "false"):
        given = {"enable-shared-prefix-attention": setting}
        [outcome] = tiny_proof(None, "shared", **given).outcomes
        assert outcome.status == (SAME if setting == "true" else NOT_HERE)
        assert bool(outcome.fired) == (setting == "true")


def each_fault() -> list[Any]:
    """Numpy takes its time over crowds and many chunks: those faults belong to the full tier."""
    return [
        pytest.param(
            fault,
            id=fault.name,
            marks=[pytest.mark.slow]
            if fault.in_reference and fault.check in ("company", "chunks")
            else [],
        )
        for fault in FAULTS
    ]


@pytest.mark.parametrize("fault", each_fault())
def test_a_fault_is_found_by_its_check(fault: Fault) -> None:
    [outcome] = tiny_proof(fault, fault.check).outcomes
    if outcome.status == NOT_HERE:
        pytest.skip(outcome.not_here)
    assert outcome.status == DIFFERENT, outcome
    found = outcome.reproduction
    assert found is not None
    names = [probe.name for probe in found.probes]
    assert found.differing in (names or [found.varied])  # a check of counts has no requests
    assert found.difference.expected != found.difference.actual


@pytest.mark.parametrize(
    "name", ["none: numpy reference", "unmasked-recycled-page", "wrong-prefix-block"]
)
def test_faults_with_int8_kv(name: str) -> None:
    fault = fault_named(name)
    [outcome] = tiny_proof(fault, fault.check or "recycled", **{"kv-cache-dtype": "int8"}).outcomes
    assert outcome.status == (DIFFERENT if fault.check else SAME), outcome


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(len(available_isas()) < 2, reason="one instruction set is compared with none")
def test_the_page_holds_the_matrix() -> None:
    proofs = run_matrix(resolve({}, {}), lambda name: None)
    assert escaped(proofs) == []
    assert replace_matrix(PAGE, markdown(proofs)) == PAGE


def test_the_page_names_every_fault_and_check() -> None:
    table = PAGE.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert rows[0] == ["fault", *(check.name for check in CHECKS)]
    faults = {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}
    assert list(faults) == [fault.name for fault in (*WITHOUT_FAULT, *FAULTS)]
    for fault in FAULTS:
        assert faults[fault.name][fault.check] == "**x**"
        assert f"| `{fault.name}` |" in PAGE
    for check in CHECKS:
        assert f"`{check.name}`" in PAGE
    assert "crash" not in "".join(table)
    assert "x" not in "".join(
        cell for fault in WITHOUT_FAULT for cell in faults[fault.name].values()
    )
