"""`poise verify isolation`: passes as things are, and finds each fault with the check named for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poise.cli.main import run
from poise.config import resolve
from poise.verify.faults import Fault
from poise.verify.isolation import ISOLATION_CHECKS, auc, isolation_checks_named
from poise.verify.isolation_faults import ISOLATION_FAULTS
from poise.verify.proof import Proof, prove
from poise.verify.trials import DIFFERENT, SAME

PAGE = (Path(__file__).parents[3] / "docs/TENANTS.md").read_text(encoding="utf-8")
UNTIMED = [check.name for check in ISOLATION_CHECKS if check.name != "timing"]


def tiny_proof(fault: Fault | None, *names: str) -> Proof:
    checks = isolation_checks_named(names)
    return prove(resolve({}, {}), quick=True, checks=checks, fault=fault, tiny=True, shrink=False)


def test_nothing_gets_through_as_things_are() -> None:
    proof = tiny_proof(None, *UNTIMED)
    assert {o.name: (o.status, o.broken, o.fired) for o in proof.outcomes if o.status != SAME} == {}
    fired = {outcome.name: outcome.fired for outcome in proof.outcomes}
    assert fired["others"]["tokens that the victim found again"] > 100
    assert fired["collision"]["lookups that met a foreign block"] > 0


@pytest.mark.parametrize("fault", ISOLATION_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_by_its_check(fault: Fault) -> None:
    [outcome] = tiny_proof(fault, fault.check).outcomes
    assert outcome.status == DIFFERENT, outcome
    assert outcome.reproduction is not None


def test_every_untimed_check_has_a_fault() -> None:
    assert {fault.check for fault in ISOLATION_FAULTS} == set(UNTIMED)


def test_the_page_names_every_check_and_fault() -> None:
    for check in ISOLATION_CHECKS:
        assert f"`{check.name}`" in PAGE
    for fault in ISOLATION_FAULTS:
        assert f"`{fault.name}`" in PAGE


def test_pairs_that_time_tells_apart() -> None:
    assert auc([1, 2], [3, 4]) == 1
    assert auc([3, 4], [1, 2]) == 0
    assert auc([1, 2], [1, 2]) == 0.5
    assert auc([1, 4], [2, 3]) == 0.5


def test_the_verb_as_a_user_sees_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "isolation", "--quick", "--json", "--inject", "salt-ignored", "--check"]
    assert run([*arguments, "others"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["fault"] == "salt-ignored"
    assert record["checks"][0]["status"] == "DIFFERENT"
    assert run([*arguments, "speed"]) == 2
    assert "no such check; known: others" in capsys.readouterr().err
    assert run(["verify", "isolation", "--list-faults"]) == 0
    assert "salt-dropped" in capsys.readouterr().out
