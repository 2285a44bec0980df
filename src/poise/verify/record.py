"""Answers kept in a file, to hold a restart, an upgrade or another machine against them.

Knows files and answers. Invariant: a record holds the requests themselves, so that what is compared is never
another version's idea of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from poise.engine.client import EngineInfo
from poise.errors import ConfigError
from poise.verify.answers import Answer, Probe
from poise.verify.rig import Rig
from poise.verify.trials import Lab, Outcome, Trials, measured

FORMAT = "poise answers 1"


@dataclass(frozen=True, slots=True)
class Record:
    """What one process answered, each request alone. Equal `fingerprint` must mean equal bytes."""

    format: str
    model: str
    fingerprint: str
    details: Mapping[str, str]
    probes: list[Probe]
    answers: list[Answer]


def save(path: Path, lab: Lab, info: EngineInfo) -> None:
    """Raises ConfigError where the file can't be written."""
    answers = [lab.alone[probe.name] for probe in lab.probes]
    record = Record(FORMAT, info.model, info.system_fingerprint, info.details, lab.probes, answers)
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror}") from None


def read(path: Path) -> Record:
    """Raises ConfigError where the file is no record."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise ConfigError(f"--against {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--against {path}: not a record of answers ({error})") from None
    if record.format != FORMAT or len(record.probes) != len(record.answers):
        raise ConfigError(f"--against {path}: format {record.format!r}, expected {FORMAT!r}")
    return record


def compare(record: Record, rig: Rig, info: EngineInfo) -> Outcome:
    """Asks the recorded requests again, each alone."""
    largest = max((token_id for probe in record.probes for token_id in probe.token_ids), default=0)
    if largest >= info.vocab_size:
        raise ConfigError(
            f"the record is of {record.model}, whose tokens {info.model} does not have"
        )
    outcome = Outcome("record", "", _words(record, info))
    with measured(outcome):
        here = Lab(rig, record.probes)
        answers = [here.alone[probe.name] for probe in record.probes]
        here.alone = {p.name: answer for p, answer in zip(record.probes, record.answers)}
        trials = Trials(here, outcome)
        trials.compare(
            "then and now", "each request alone", record.probes, answers, each_alone=True
        )
        trials.fired("recorded answers", len(answers))
    return outcome


def _words(record: Record, info: EngineInfo) -> str:
    """What the two fingerprints promise."""
    if record.fingerprint == info.system_fingerprint:
        return f"{record.fingerprint} then and now: the bytes must be equal"
    return (
        f"recorded as {record.model} {record.fingerprint}, here {info.model} "
        f"{info.system_fingerprint}: model, numerics or settings differ, equal bytes are not promised"
    )
