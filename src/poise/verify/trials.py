"""One check's work: trials against the answers that each request gets alone, what fired, what differed.

Knows runs and answers, not what is varied or why. Invariant: a check passes iff it compared something, every
feature that it names fired, and no bit differed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from poise.errors import PoiseError
from poise.verify.answers import Answer, Difference, Probe, first_difference
from poise.verify.rig import Rig, Run, Setup, TrialBrokenError, fill_pages

MAX_RERUNS = 20

Runner = Callable[[Sequence[Probe]], Run]

SAME, DIFFERENT, NOT_FIRED, BROKEN, NOT_HERE = (
    "same",
    "DIFFERENT",
    "NOT FIRED",
    "BROKEN",
    "not here",
)


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The smallest trial that was found to differ: these requests, in this order, under this setup."""

    varied: str
    setup: str
    probes: tuple[Probe, ...]
    differing: str  # the probe whose answer differs
    difference: Difference


@dataclass(slots=True)
class Outcome:
    """What a check found."""

    name: str
    level: str
    claim: str
    varied: list[str] = field(default_factory=list)
    fired: dict[str, int] = field(default_factory=dict)
    num_answers: int = 0
    num_positions: int = 0
    num_different: int = 0
    reproduction: Reproduction | None = None
    broken: str | None = None
    not_here: str | None = None
    seconds: float = 0.0

    @property
    def status(self) -> str:
        if self.broken is not None:
            return BROKEN
        if self.num_different:
            return DIFFERENT
        if self.not_here is not None:
            return NOT_HERE
        if self.num_answers == 0 or not self.fired or not all(self.fired.values()):
            return NOT_FIRED
        return SAME

    @property
    def passed(self) -> bool:
        return self.status in (SAME, NOT_HERE)


class Lab:
    """A rig, its probes, and the answer that each gets alone, which all trials are held against: on clean
    pages, with nothing else in the engine, prefix cache off.

    Raises TrialBrokenError if the engine can't even do that.
    """

    def __init__(self, rig: Rig, probes: list[Probe]) -> None:
        self.rig = rig
        self.probes = probes
        self.alone: dict[str, Answer] = {}
        self._answered: dict[str, Probe] = {}
        self.answer_alone(probes)  # at once: later it would write on pages that a trial relies on

    def answer_alone(self, probes: Sequence[Probe]) -> None:
        """Makes these the requests that trials may send too. Not while pages of a trial are to be kept."""
        for probe in probes:
            fill_pages(self.rig.base, self.rig.blocks_for([probe], self.rig.base), 0)
            [answer] = self.rig.engine(Setup()).run([probe]).answers
            assert answer is not None, "nothing was aborted"
            known = self._answered.setdefault(probe.name, probe)
            assert known == probe, f"two requests are called {probe.name}"
            self.alone[probe.name] = answer


class Trials:
    """Runs a check's trials and fills its outcome."""

    def __init__(self, lab: Lab, outcome: Outcome, shrink: bool = True) -> None:
        self.lab = lab
        self.outcome = outcome
        self._shrink = shrink

    def fired(self, feature: str, count: int) -> None:
        """Counts what a trial exercised; a feature that stays at 0 fails the check."""
        self.outcome.fired[feature] = self.outcome.fired.get(feature, 0) + count

    def expect(
        self,
        varied: str,
        setup: str,
        where: str,
        expected: object,
        actual: object,
        probes: Sequence[Probe] = (),
    ) -> None:
        """Holds one figure against what it must be, as if it were an answer."""
        outcome = self.outcome
        if varied not in outcome.varied:
            outcome.varied.append(varied)
        outcome.num_answers += 1
        if expected == actual:
            return
        outcome.num_different += 1
        if outcome.reproduction is None:
            difference = Difference(where, str(expected), str(actual))
            named = probes[0].name if probes else varied
            outcome.reproduction = Reproduction(varied, setup, tuple(probes), named, difference)

    def run(
        self,
        varied: str,
        setup: Setup,
        probes: Sequence[Probe],
        runner: Runner | None = None,
    ) -> Run:
        """Runs one trial and compares every answer in it. `runner` runs probes in another way than all at
        once in a fresh engine.
        """
        run_probes = runner or (lambda chosen: self.lab.rig.engine(setup).run(chosen))
        run = run_probes(probes)
        self.compare(varied, str(setup), probes, run.answers, run_probes)
        return run

    def compare(
        self,
        varied: str,
        setup: str,
        probes: Sequence[Probe],
        answers: Sequence[Answer | None],
        rerun: Runner | None = None,
        expected: Sequence[Answer | None] | None = None,
        each_alone: bool = False,
    ) -> None:
        """Holds answers against `expected`, by default those that the probes get alone.

        `rerun` allows to look for a smaller case; none is needed where each was asked alone here too.
        """
        outcome = self.outcome
        outcome.varied.append(varied)
        for index, (probe, answer) in enumerate(zip(probes, answers, strict=True)):
            if answer is None:
                continue
            outcome.num_answers += 1
            outcome.num_positions += answer.num_positions
            wanted = expected[index] if expected else self.lab.alone[probe.name]
            assert wanted is not None, "nothing is held against an aborted request"
            difference = first_difference(wanted, answer)
            if difference is None:
                continue
            outcome.num_different += 1
            if outcome.reproduction is None:
                needed = (probe,) if each_alone else tuple(probes)
                outcome.reproduction = Reproduction(varied, setup, needed, probe.name, difference)
                if rerun is not None and self._shrink:
                    outcome.reproduction = self._smallest(outcome.reproduction, index, rerun)

    def _smallest(self, found: Reproduction, index: int, rerun: Runner) -> Reproduction:
        """Takes neighbours away, half of them at a time, as long as the answer still differs.

        Gives up looking after `MAX_RERUNS`, with the smallest case so far.
        """
        subject = found.probes[index]
        others = [place for place in range(len(found.probes)) if place != index]
        size, all_probes = len(others), found.probes
        reruns = 0
        while others and size >= 1 and reruns < MAX_RERUNS:
            for begin in range(0, len(others), size):
                fewer = others[:begin] + others[begin + size :]
                probes = [all_probes[place] for place in sorted([*fewer, index])]
                difference = self._differs(subject, probes, rerun)
                reruns += 1
                if difference is not None:
                    found = Reproduction(
                        found.varied, found.setup, tuple(probes), subject.name, difference
                    )
                    others = fewer
                    break
            else:
                size //= 2
        return found

    def _differs(self, subject: Probe, probes: Sequence[Probe], rerun: Runner) -> Difference | None:
        """The difference of the subject's answer in this company, if it has one."""
        answers = rerun(probes).answers
        for probe, answer in zip(probes, answers, strict=True):
            if probe is subject and answer is not None:
                difference = first_difference(self.lab.alone[probe.name], answer)
                if difference is not None:
                    return difference
        return None


@contextmanager
def measured(outcome: Outcome) -> Iterator[None]:
    """Times a check; an engine that fails instead of answering makes it broken, not different."""
    begin = time.monotonic()
    try:
        yield
    except TrialBrokenError as error:
        outcome.broken = str(error)
    except (PoiseError, KeyboardInterrupt):
        raise
    except Exception as error:
        outcome.broken = f"{type(error).__name__}: {error}"
    finally:
        outcome.seconds = time.monotonic() - begin
