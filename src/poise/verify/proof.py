"""A whole proof: the model opened, the answers that requests get alone, every check held against them.

Knows rooms and order; the checks know what is proved. Invariant: a proof passes iff each of its outcomes does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from poise.config import Settings
from poise.engine.build import open_source
from poise.engine.client import EngineInfo
from poise.verify.checks import CHECKS, FULL, QUICK, Check, run_check
from poise.verify.faults import Fault, tiny_checkpoint
from poise.verify.probes import build_probes
from poise.verify.record import Record, compare, save
from poise.verify.rig import Rig
from poise.verify.trials import Lab, Outcome


@dataclass(frozen=True, slots=True)
class Proof:
    """What was run, and what it found."""

    info: EngineInfo
    quick: bool
    fault: Fault | None
    num_requests: int
    outcomes: Sequence[Outcome]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def caught(self) -> bool:
        """Whether the check that is named for the fault found a difference."""
        named = [o for o in self.outcomes if self.fault is not None and o.name == self.fault.check]
        return any(outcome.num_different and outcome.broken is None for outcome in named)


def prove(
    settings: Settings,
    *,
    quick: bool,
    checks: Sequence[Check] = CHECKS,
    fault: Fault | None = None,
    tiny: bool = False,
    against: Record | None = None,
    record: Path | None = None,
    shrink: bool = True,
    tell: Callable[[str], None] = lambda stage: None,
) -> Proof:
    """Runs the checks on the model of `settings`, or on a tiny random one.

    `shrink` looks for the smallest case of a difference; `tell` is told what comes next. Raises PullError, ModelFileError, ConfigError, and TrialBrokenError
    where not even a lone request is answered.
    """
    begin = monotonic()
    with fault.injected() if fault else nullcontext():
        checkpoint = tiny_checkpoint() if tiny else open_source(settings.source)
        tell(f"loading {checkpoint.name}")
        rig = Rig(settings, checkpoint, fault.name if fault else None, tiny)
        info = rig.info
        probes = rig.fitting(
            build_probes(rig.tokenizer, info.vocab_size, quick=quick, windows=rig.windows)
        )
        tell(f"answering {len(probes)} requests, each alone")
        lab = Lab(rig, probes)
        if record is not None:
            save(record, lab, info)
        outcomes = []
        for check in checks:
            tell(f"{check.name}: {check.claim}")
            outcomes.append(run_check(check, lab, QUICK if quick else FULL, shrink=shrink))
        if against is not None:
            tell("asking the recorded requests again")
            outcomes.append(compare(against, rig, info))
    return Proof(info, quick, fault, len(probes), outcomes, monotonic() - begin)
