"""Where the records of benchmarks lie, and how one is written: what was measured, when, and on what."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from poise.bench.record import write_bytes
from poise.bench.runner import provenance

RECORDS = Path(__file__).parents[1] / "docs" / "records"


def write_record(kind: str, figures: dict[str, Any], output: Path | None) -> Path:
    """Writes the figures of a benchmark that has just ended, to docs/records/KIND-TIME.json or where `output` says."""
    now = datetime.now(UTC)
    record = {
        "schema": f"poise.benchmarks.{kind}/1",
        "created": now.isoformat(timespec="seconds"),
        "provenance": provenance(),
        **figures,
    }
    target = output or RECORDS / f"{kind}-{now:%Y%m%d-%H%M}.json"
    write_bytes(target, msgspec.json.format(msgspec.json.encode(record), indent=2))
    return target
