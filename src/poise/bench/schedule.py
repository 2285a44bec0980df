"""The schedule: every request of a run, decided before it starts, hashed, writable and replayable.

Knows no HTTP and no server. Invariant: one schedule has one canonical JSON text and so one SHA-256; replaying the file sends
exactly the same prompts at the same planned instants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from poise.bench.record import RecordError, ScheduleInfo, write_bytes

SCHEMA = "poise.bench.schedule/1"

Prompt = str | Sequence[int | dict[str, Any]]
"""Text, token ids, or chat messages; ids and messages are never mixed."""


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request to send. `at` is seconds from the start of the run, None in a closed loop."""

    prompt: Prompt
    max_tokens: int
    at: float | None = None
    input_length: int | None = None
    """Tokens of the prompt where they are known before the server counts them."""
    ignore_eos: bool = True


class _Body(msgspec.Struct, frozen=True):
    """What is hashed."""

    kind: Literal["completions", "chat"]
    seed: int
    workload: dict[str, Any]
    arrivals: dict[str, Any]
    warmups: list[PlannedRequest]
    requests: list[PlannedRequest]


class _File(msgspec.Struct, frozen=True):
    schema: str
    sha256: str
    schedule: msgspec.Raw


@dataclass(frozen=True)
class Schedule:
    """A whole run's load. Warm-ups are sent first, one after the other, and never measured."""

    kind: Literal["completions", "chat"]
    seed: int
    workload: dict[str, Any]
    arrivals: dict[str, Any]
    requests: Sequence[PlannedRequest]
    warmups: Sequence[PlannedRequest] = field(default_factory=tuple)

    @cached_property
    def canonical(self) -> bytes:
        """Compact JSON with sorted keys; equal schedules have equal bytes."""
        body = _Body(
            self.kind,
            self.seed,
            self.workload,
            self.arrivals,
            list(self.warmups),
            list(self.requests),
        )
        return msgspec.json.encode(body, order="sorted")

    @cached_property
    def sha256(self) -> str:
        return sha256(self.canonical).hexdigest()

    @property
    def concurrency(self) -> int | None:
        """Most requests in flight; None where nothing limits them."""
        limit = self.arrivals.get("concurrency", self.arrivals.get("max_concurrency"))
        return limit if isinstance(limit, int) else None

    @property
    def is_closed(self) -> bool:
        return self.arrivals.get("process") == "closed"

    def info(self) -> ScheduleInfo:
        return ScheduleInfo(
            self.sha256, self.seed, len(self.requests), self.workload, self.arrivals
        )

    def write(self, path: Path) -> None:
        """Writes the schedule file; RecordError where the disk refuses it."""
        write_bytes(
            path,
            b'{"schema":"%s","sha256":"%s","schedule":%s}\n'
            % (SCHEMA.encode(), self.sha256.encode(), self.canonical),
        )


def read_schedule(path: Path) -> Schedule:
    """Reads a schedule file; RecordError names the file and what is wrong, a changed digest included."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        if file.schema != SCHEMA:
            raise RecordError(
                f"{path}: schema {file.schema!r}, this version of poise reads {SCHEMA!r}"
            )
        body = msgspec.json.decode(file.schedule, type=_Body)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordError(f"{path}: not a schedule file: {error}") from None
    schedule = Schedule(
        body.kind, body.seed, body.workload, body.arrivals, body.requests, body.warmups
    )
    if schedule.sha256 != file.sha256:
        raise RecordError(
            f"{path}: its content has digest {schedule.sha256[:12]}…, it claims {file.sha256[:12]}…"
        )
    check(schedule, path)
    return schedule


def check(schedule: Schedule, path: Path) -> None:
    """A schedule from a file must be one that can be run."""
    if not schedule.requests:
        raise RecordError(f"{path}: a schedule without requests")
    for number, request in enumerate([*schedule.warmups, *schedule.requests]):
        kinds = {type(item) for item in request.prompt}
        if len(kinds) != 1 or kinds == {bool} or request.max_tokens < 1:
            raise RecordError(f"{path}: request {number} has no proper prompt or max_tokens")
        if schedule.kind == "chat" and kinds != {dict}:
            raise RecordError(f"{path}: request {number} has no messages for the chat endpoint")
    instants = [request.at for request in schedule.requests]
    if schedule.is_closed:
        if schedule.concurrency is None or schedule.concurrency < 1:
            raise RecordError(f"{path}: a closed schedule needs a concurrency of at least 1")
        return
    known = [at for at in instants if at is not None]
    if len(known) != len(instants) or known != sorted(known) or known[0] < 0:
        raise RecordError(f"{path}: planned instants must be given, ascending and not negative")


def shareable_tokens(requests: Sequence[PlannedRequest]) -> int | None:
    """Prompt tokens that a perfect prefix cache would find in earlier prompts: all tokens less the edges of their trie.

    None where prompts are text, whose tokens only the server knows.
    """
    prompts: list[list[int]] = []
    for request in requests:
        ids = [token for token in request.prompt if isinstance(token, int)]
        if len(ids) != len(request.prompt):
            return None
        prompts.append(ids)
    prompts.sort()
    return sum(_common_prefix(a, b) for a, b in pairwise(prompts))


def _common_prefix(a: list[int], b: list[int]) -> int:
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest
    low, high = 0, shortest  # a[:low] agrees, a[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
