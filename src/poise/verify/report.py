"""A proof as people and programs read it.

Knows no checks. Invariant: the first difference is shown with all that is needed to see it again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from poise.core.sampling_params import SamplingParams
from poise.verify.answers import Probe
from poise.verify.proof import Proof
from poise.verify.trials import BROKEN, DIFFERENT, NOT_FIRED, SAME, Outcome, Reproduction

MOST_SHOWN = 6
STYLES = {SAME: "green", DIFFERENT: "bold red", BROKEN: "bold red", NOT_FIRED: "bold yellow"}


def print_proof(proof: Proof, console: Console) -> None:
    console.print(proof_table(proof))
    for outcome in proof.outcomes:
        if outcome.status != SAME:
            console.print(explanation(outcome), soft_wrap=True)
    console.print(verdict(proof), soft_wrap=True)


def proof_table(proof: Proof) -> Table:
    info = proof.info
    settings = ", ".join(
        f"{name} {info.details[name]}"
        for name in ("isa", "threads", "kv_dtype")
        if name in info.details
    )
    table = Table(
        "", "check", "varied", "fired", "answers", "result", "s",
        title=f"{info.model} ({info.details.get('format', 'unknown format')}), {settings}, "
        f"{info.system_fingerprint}",
        title_justify="left",
        caption=f"{proof.num_requests} requests, each held against its answer alone: token ids, bits of "
        "logprobs, text, finish reason",
        caption_justify="left",
    )  # fmt: skip
    for column in (4, 6):
        table.columns[column].justify = "right"
    for outcome in proof.outcomes:
        table.add_row(
            outcome.level,
            f"{outcome.name}\n[dim]{outcome.claim}[/]",
            _shortened(outcome.varied),
            "\n".join(f"{count:,} {what}" for what, count in outcome.fired.items()),
            f"{outcome.num_answers:,}\n[dim]{outcome.num_positions:,} tokens[/]",
            Text(result(outcome), STYLES.get(outcome.status, "dim")),
            f"{outcome.seconds:.1f}",
        )
    return table


def result(outcome: Outcome) -> str:
    """The outcome in a word, or in a number of answers that differ."""
    if outcome.status == DIFFERENT:
        return f"{outcome.num_different:,} DIFFERENT"
    return outcome.status


def _shortened(varied: Sequence[str]) -> str:
    if len(varied) > MOST_SHOWN:
        varied = [*varied[: MOST_SHOWN - 2], "…", varied[-1]]
    return ", ".join(varied)


def explanation(outcome: Outcome) -> Group:
    """Why a check did not pass, and how to see it again."""
    lines = [Text(f"\n{outcome.name}: {outcome.status}", STYLES.get(outcome.status, "dim"))]
    if outcome.broken is not None:
        lines.append(Text(f"  the engine failed: {outcome.broken}"))
    if outcome.not_here is not None:
        lines.append(Text(f"  {outcome.not_here}"))
    if outcome.status == NOT_FIRED:
        missing = [what for what, count in outcome.fired.items() if not count]
        lines.append(Text(f"  not exercised: {', '.join(missing) or 'anything'}"))
    if outcome.reproduction is not None:
        lines.extend(_reproduction(outcome.reproduction))
    return Group(*lines)


def _reproduction(found: Reproduction) -> list[Text]:
    difference = found.difference
    lines = [
        Text(f"  first difference: request {found.differing}, {difference.where}"),
        Text(f"    expected: {difference.expected}"),
        Text(f"    here:     {difference.actual}"),
        Text(f"  smallest case found: {found.varied}; {found.setup}; {_count(found.probes)}"),
    ]
    for probe in found.probes[:MOST_SHOWN]:
        lines.append(Text(f"    {probe.name}: {json.dumps(request(probe))}", "dim"))
    if len(found.probes) > MOST_SHOWN:
        lines.append(Text(f"    and {len(found.probes) - MOST_SHOWN} more: see --json", "dim"))
    return lines


def _count(probes: Sequence[Probe]) -> str:
    return "one request" if len(probes) == 1 else f"{len(probes)} requests"


def request(probe: Probe) -> dict[str, Any]:
    """The request as one would send it, without what is at its default."""
    default = asdict(SamplingParams())
    asked = {name: value for name, value in asdict(probe.params).items() if value != default[name]}
    return {"prompt": list(probe.token_ids), "seed": probe.seed, **asked}


def verdict(proof: Proof) -> Text:
    if proof.fault is not None:
        word = "caught" if proof.caught else "NOT CAUGHT"
        return Text(
            f"injected {proof.fault.name} ({proof.fault.what}): {word} by the check named for it, "
            f"{proof.fault.check}",
            "green" if proof.caught else "bold red",
        )
    failed = [outcome.name for outcome in proof.outcomes if not outcome.passed]
    if failed:
        return Text(f"failed: {', '.join(failed)} ({proof.seconds:.0f} s)", "bold red")
    compared = sum(outcome.num_answers for outcome in proof.outcomes)
    return Text(f"the same bytes in all {compared:,} answers ({proof.seconds:.0f} s)", "green")


def as_json(proof: Proof) -> str:
    """One object. Float bits are integers; a reproduction holds its requests whole."""
    return json.dumps(
        {
            "model": proof.info.model,
            "system_fingerprint": proof.info.system_fingerprint,
            "details": proof.info.details,
            "quick": proof.quick,
            "fault": proof.fault.name if proof.fault else None,
            "passed": proof.passed,
            "seconds": round(proof.seconds, 1),
            "checks": [_outcome_json(outcome) for outcome in proof.outcomes],
        },
        ensure_ascii=False,
        indent=1,
    )


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    found = outcome.reproduction
    record = asdict(outcome) | {"status": outcome.status, "seconds": round(outcome.seconds, 1)}
    record["reproduction"] = found and {
        "varied": found.varied,
        "setup": found.setup,
        "requests": [{"name": probe.name, **request(probe)} for probe in found.probes],
        "differing": found.differing,
        "difference": asdict(found.difference),
    }
    return record
