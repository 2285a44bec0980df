"""One log line per generation request: sizes and times, never a prompt or an answer.

Owns the logger "poise.requests". Invariant: nothing a client wrote reaches the line except its own request id, in
printable ASCII.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from poise.server.formats import Tally

logger = logging.getLogger("poise.requests")


@dataclass(frozen=True, slots=True)
class RequestLog:
    """Writes the lines, as `text` or as `json`."""

    log_format: str

    def finished(
        self,
        request_id: str,
        client_id: str | None,
        tally: Tally,
        total: float,
        outcome: str | None,
    ) -> None:
        """`outcome` tells how a request ended that has no finish reason of its own (disconnect, error)."""
        queue = max((stats.queue_seconds for stats in tally.stats), default=None)
        first = [stats.time_to_first_token_seconds for stats in tally.stats]
        known = [seconds for seconds in first if seconds is not None]
        record: dict[str, object] = {
            "id": request_id,
            "client_id": client_id,
            "in": tally.num_prompt_tokens,
            "cached": tally.num_cached_tokens,
            "out": tally.num_output_tokens,
            "queue_s": _rounded(queue),
            "ttft_s": _rounded(min(known, default=None)),
            "total_s": _rounded(total),
            "finish": outcome or "+".join(sorted(set(tally.finish_reasons))),
        }
        self._write(record)

    def refused(
        self, request_id: str, client_id: str | None, status: int, about: str | None
    ) -> None:
        """A request that never reached the engine; `about` is a parameter's name or an error code."""
        self._write({"id": request_id, "client_id": client_id, "status": status, "about": about})

    def _write(self, record: dict[str, object]) -> None:
        present = {name: value for name, value in record.items() if value is not None}
        if self.log_format == "json":
            logger.info("%s", msgspec.json.encode(present).decode())
        else:
            logger.info("%s", " ".join(f"{name}={value}" for name, value in present.items()))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
