"""Every fault against every check, on the tiny random model: the proof of the proofs, as a table in Markdown.

Invariant: a row is complete only if the check named for the fault found a difference and no check crashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from poise.config import Settings
from poise.verify.checks import CHECKS
from poise.verify.faults import FAULTS, WITHOUT_FAULT
from poise.verify.proof import Proof, prove
from poise.verify.trials import BROKEN, DIFFERENT, NOT_FIRED, NOT_HERE, SAME

BEGIN, END = "<!-- fault matrix: begin -->", "<!-- fault matrix: end -->"
MARKS = {SAME: "·", DIFFERENT: "x", BROKEN: "crash", NOT_FIRED: "not fired", NOT_HERE: "not here"}


def run_matrix(settings: Settings, tell: Callable[[str], None]) -> list[Proof]:
    """Two proofs without a fault, then one for each fault."""
    proofs = []
    for fault in (*WITHOUT_FAULT, *FAULTS):
        tell(fault.name)
        proofs.append(prove(settings, quick=True, fault=fault, tiny=True, shrink=False))
    return proofs


def escaped(proofs: Sequence[Proof]) -> list[str]:
    """What is wrong with the proofs, a line each."""
    problems = []
    for proof in proofs:
        fault = proof.fault
        assert fault is not None, "the matrix names what it injects"
        problems += [
            f"{fault.name}: {outcome.name} crashed ({outcome.broken})"
            for outcome in proof.outcomes
            if outcome.broken is not None
        ]
        if fault in WITHOUT_FAULT and not proof.passed:
            problems.append(f"{fault.name}: a check fails")
        if fault not in WITHOUT_FAULT and not proof.caught:
            problems.append(f"{fault.name}: not caught by {fault.check}")
    return problems


def markdown(proofs: Sequence[Proof]) -> str:
    """`x` found a difference, bold where the check is the one named for the fault; `·` found none."""
    names = [check.name for check in CHECKS]
    lines = [f"| fault | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for proof in proofs:
        fault = proof.fault
        assert fault is not None, "the matrix names what it injects"
        marks = {outcome.name: MARKS[outcome.status] for outcome in proof.outcomes}
        if fault.check:
            marks[fault.check] = f"**{marks[fault.check]}**"
        lines.append(f"| {fault.name} | {' | '.join(marks[name] for name in names)} |")
    return "\n".join(lines)


def replace_matrix(page: str, table: str) -> str:
    """The page with the table between its two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    assert rest, f"the page has no {BEGIN}"
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"
