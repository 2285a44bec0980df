"""The schema of what a measurement leaves behind: one record (JSON) and one row per offered request (JSONL beside it).

Shared by the load generator, comparisons, reports and the planner; computes nothing. Invariant: every time is in seconds on
`time.perf_counter`, counted from the start of the run, and what was not observed is None, never 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from poise.errors import PoiseError

SCHEMA = "poise.bench.run/1"

Status = Literal["ok", "error", "timeout", "cancelled", "truncated"]
"""ok: complete answer. error: refused, failed or said so after HTTP 200. timeout: over the client's limit. cancelled: given
up, or never sent, because the run ended. truncated: the stream ended without a finish reason or `[DONE]`."""

TokenSource = Literal["continuous usage", "one per chunk"]
"""How a stream's chunks were given token counts: differences of running usage, or one each where that agrees with usage."""


class RecordError(PoiseError):
    """A record, row or schedule file can't be read or written; the message names the file."""


@dataclass(slots=True)
class RequestRow:
    """One offered request. planned ≤ ready ≤ sent ≤ first_byte ≤ first_token ≤ end, where they exist."""

    index: int
    planned: float
    """When the schedule wanted it sent; in a closed loop, when its slot became free."""
    ready: float | None = None
    """When the concurrency limit let it through (planned, where nothing held it back)."""
    sent: float | None = None
    """Just before the connection is opened; None if it was never sent."""
    first_byte: float | None = None
    """When the answer's head arrived."""
    first_event: float | None = None
    """First server-sent event of any kind, an empty role delta included."""
    first_token: float | None = None
    """First chunk with a token in it: answer, reasoning or tool call. None where the answer was not streamed."""
    first_reasoning: float | None = None
    first_answer: float | None = None
    first_tool_call: float | None = None
    end: float | None = None
    status: Status = "cancelled"
    http_status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    streamed: bool = True
    input_length: int | None = None
    """Prompt tokens as planned; None where the schedule does not know (text)."""
    expected_output_tokens: int | None = None
    """What was asked for with `ignore_eos`; None where the server may stop when it likes."""
    prompt_tokens: int | None = None
    """From the server's usage, as are the next two."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    token_source: TokenSource | None = None
    """None where the tokens of single chunks are not known."""
    chunk_times: list[float] = field(default_factory=list)
    """Arrival of each chunk that holds at least one token."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Tokens in each of those chunks; empty where `token_source` is None."""
    text_sha256: str | None = None
    """Of the answer's text in UTF-8, reasoning not included."""
    text: str | None = None
    """The text itself, where it was asked for."""


@dataclass(slots=True)
class Percentile:
    """One percentile with the interval that order statistics give; low or high None: n is too small, and `note` says so."""

    percent: float
    value: float | None
    low: float | None
    high: float | None
    confidence: float
    hyndman_fan_type: int
    note: str | None = None


@dataclass(slots=True)
class Distribution:
    """A measured quantity over a window. Values are in `unit` (seconds: "s")."""

    definition: str
    unit: str
    n: int
    mean: float | None
    minimum: float | None
    maximum: float | None
    percentiles: list[Percentile]
    num_missed: int = 0
    """Of n, requests that failed: they count as infinitely late, and mean and maximum leave them out."""
    effective_n: float | None = None
    """n (1 − ρ₁) / (1 + ρ₁) in order of arrival; far below n, the intervals are too narrow."""

    def percentile(self, percent: float) -> Percentile | None:
        return next((item for item in self.percentiles if item.percent == percent), None)


@dataclass(slots=True)
class Figure:
    """A single number, with an interval where it is an estimated share."""

    definition: str
    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    n: int | None = None


@dataclass(slots=True)
class WindowSummary:
    """Everything computed on one window: latencies of requests planned in it, events that happened in it."""

    begin: float
    end: float
    num_offered: int
    distributions: dict[str, Distribution]
    figures: dict[str, Figure]
    statuses: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Gate:
    """A check that the run can be believed. "unchecked" says that the server or the load gave nothing to check."""

    name: str
    verdict: Literal["pass", "fail", "unchecked"]
    reason: str
    value: float | None = None
    limit: float | None = None
    unit: str = ""


@dataclass(slots=True)
class Scrape:
    """One reading of the server's /metrics: sums over label sets, by sample name (`vllm:num_preemptions_total`)."""

    time: float
    phase: Literal["before", "during", "after"]
    values: dict[str, float]
    error: str | None = None


@dataclass(slots=True)
class ServerInfo:
    """What was measured: `name` is the label people chose, `base_url` has no credentials in it."""

    name: str
    base_url: str
    endpoint: str
    model: str


@dataclass(slots=True)
class ScheduleInfo:
    """Which load was offered; two runs with one `sha256` sent the same requests at the same planned instants."""

    sha256: str
    seed: int
    num_requests: int
    workload: dict[str, Any]
    arrivals: dict[str, Any]


@dataclass(slots=True)
class ClientOptions:
    """How the client sent it."""

    stream: bool = True
    reuse_connections: bool = False
    timeout_s: float = 600.0
    num_warmups: int = 0
    cache: Literal["cold", "warm", "natural"] = "natural"
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RunRecord:
    """One run of a schedule against one server. `valid` is False when a gate failed or the run stopped early."""

    created: str
    """UTC, ISO 8601."""
    server: ServerInfo
    schedule: ScheduleInfo
    client: ClientOptions
    provenance: dict[str, Any]
    """`poise.machine.environment_report()` of the client's host, with load average and clock."""
    duration_s: float
    summary: dict[str, WindowSummary]
    """"full" always; "steady" where there is such a window."""
    steady_note: str
    gates: list[Gate]
    valid: bool
    stopped: str | None = None
    """Why the run ended before its schedule did."""
    goodput_slos: dict[str, float] = field(default_factory=dict)
    """Limits in seconds by metric: ttft, tpot, e2el, itl_p95, chunk_gap_p95."""
    metrics: list[Scrape] = field(default_factory=list)
    rows_file: str | None = None
    rows_sha256: str | None = None
    schema: str = SCHEMA

    @property
    def failed_gates(self) -> list[Gate]:
        return [gate for gate in self.gates if gate.verdict == "fail"]

    def figure(self, name: str, window: str = "full") -> float | None:
        """A figure's value; None where the window or the figure is missing."""
        found = self.summary.get(window)
        figure = found.figures.get(name) if found else None
        return figure.value if figure else None


def write_run(record: RunRecord, rows: Sequence[RequestRow], path: Path) -> None:
    """Writes the rows to PATH with suffix .jsonl, then the record to PATH; names and digests them in `record`.

    Raises RecordError (a full disk, a missing permission); rows already on disk stay there.
    """
    rows_path = path.with_suffix(".jsonl")
    encoded = encode_rows(rows)
    record.rows_file = rows_path.name
    record.rows_sha256 = sha256(encoded).hexdigest()
    write_bytes(rows_path, encoded)
    write_bytes(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_run(path: Path) -> RunRecord:
    """Reads a record; RecordError names the file and what is wrong with it."""
    try:
        head = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise RecordError(f"{path}: not a record: {error}") from None
    found = head.get("schema") if isinstance(head, dict) else None
    if found != SCHEMA:
        raise RecordError(f"{path}: schema {found!r}, this version of poise reads {SCHEMA!r}")
    try:
        return msgspec.convert(head, RunRecord)
    except msgspec.ValidationError as error:
        raise RecordError(f"{path}: not a record: {error}") from None


def read_rows(record: RunRecord, path: Path) -> list[RequestRow]:
    """The rows of the record at PATH; RecordError where they are missing, damaged or another run's."""
    if record.rows_file is None:
        raise RecordError(f"{path}: this record has no rows file")
    rows_path = path.parent / Path(record.rows_file).name
    try:
        encoded = rows_path.read_bytes()
    except OSError as error:
        raise RecordError(f"{rows_path}: {error.strerror}") from None
    if sha256(encoded).hexdigest() != record.rows_sha256:
        raise RecordError(f"{rows_path}: the digest is not the one in {path.name}")
    return decode_rows(encoded, rows_path)


def encode_rows(rows: Iterable[RequestRow]) -> bytes:
    """One JSON object a line."""
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def decode_rows(encoded: bytes, path: Path) -> list[RequestRow]:
    """Rows from JSONL; RecordError names file and line."""
    decoder = msgspec.json.Decoder(RequestRow)
    rows = []
    for number, line in enumerate(encoded.splitlines(), 1):
        try:
            rows.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise RecordError(f"{path}:{number}: not a request row: {error}") from None
    return rows


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a whole file or leaves the old one: a temporary file beside it, synced and renamed."""
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RecordError(
            f"{path}: {error.strerror or error}; what was measured is in {temporary} as far as it went"
            if temporary.exists()
            else f"{path}: {error.strerror or error}"
        ) from None
