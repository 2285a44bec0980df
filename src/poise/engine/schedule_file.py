"""A recording of the scheduler on disk: one JSON object per line.

Knows no scheduler. Invariant: reading gives the lines that were written; a last line that was cut off is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from poise.errors import ConfigError

BUFFER_BYTES = 1 << 20


class ScheduleFile:
    """Open for writing until `close`. Raises ConfigError where the file can't be made."""

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("wb", buffering=BUFFER_BYTES)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ConfigError(f"--record-schedule {path}: {error.strerror}") from None
        self._encode = msgspec.json.Encoder().encode

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(self._encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_schedule(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a recording. Raises ConfigError for a file that is none."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
