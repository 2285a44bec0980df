"""Answers from a process of its own, under another instruction set: kernels are chosen when they are imported.

Reads one JSON object on stdin, writes one on stdout. Invariant: the child answers each request alone, as the
parent's figures were made.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, fields

import msgspec

from poise.config import CacheConfig, ComputeConfig, ModelSource, SchedulerConfig, resolve
from poise.config_flags import flag_of
from poise.verify.answers import Answer, Probe
from poise.verify.rig import Rig, TrialBrokenError

SETTINGS = (ModelSource, CacheConfig, SchedulerConfig, ComputeConfig)


@dataclass(frozen=True, slots=True)
class Question:
    """What the child is asked. `fault`: injected there too; `tiny`: on the random model of the faults."""

    given: dict[str, bool | int | float | str | None]
    probes: list[Probe]
    fault: str | None
    tiny: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """What it answers."""

    isa: str
    answers: list[Answer]


def answers_under(rig: Rig, isa: str, probes: list[Probe]) -> Reply:
    """The probes' answers under POISE_ISA=`isa`. Raises TrialBrokenError if the process fails."""
    values = rig.settings.values()
    names = [flag_of(item).name for cls in SETTINGS for item in fields(cls)]
    question = Question(
        {name: values[name] for name in names},  # type: ignore[misc]
        probes,
        rig.fault,
        rig.tiny,
    )
    done = subprocess.run(
        [sys.executable, "-m", "poise.verify.child"],
        input=msgspec.json.encode(question),
        env=os.environ | {"POISE_ISA": isa},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise TrialBrokenError(f"the process under POISE_ISA={isa} failed: {' '.join(last)}")
    return msgspec.json.decode(done.stdout, type=Reply)


def main() -> None:
    from poise.engine.build import open_source
    from poise.kernels.cpu import isa
    from poise.verify.faults import fault_named, tiny_checkpoint
    from poise.verify.trials import Lab

    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    settings = resolve(
        {name: value for name, value in question.given.items() if value is not None}, environment={}
    )
    with ExitStack() as injected:
        if question.fault is not None:
            injected.enter_context(fault_named(question.fault).injected())
        checkpoint = tiny_checkpoint() if question.tiny else open_source(settings.source)
        lab = Lab(Rig(settings, checkpoint), question.probes)
        answers = [lab.alone[probe.name] for probe in question.probes]
    sys.stdout.buffer.write(msgspec.json.encode(Reply(isa(), answers)))


if __name__ == "__main__":
    main()
