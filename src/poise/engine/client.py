"""What a front end (HTTP, CLI, offline API) and the engine say to each other.

The engine may live in this process or, later, in another one: these records hold only plain data.
Invariant: per choice, exactly one delta carries a finish reason, and it is the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from poise.core.output import TokenLogprobs
from poise.core.request import NO_OWNER, RequestOwner
from poise.core.sampling_params import SamplingParams
from poise.core.tenant import TenantTable


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt, parsed and checked. `params.n` choices are generated. `seed` is already drawn when the user gave none.

    `owner.deadline`, if any, is on the engine's clock (`time.monotonic`).
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    owner: RequestOwner = NO_OWNER


@dataclass(slots=True)
class ChoiceDelta:
    """What is new for one choice since its last delta.

    `text` is the new text that may be shown (a possible stop string's beginning is held back). `token_ids` and
    `logprobs` are the tokens behind it. `finish_reason` is stop, length, abort, error or deadline; `stop_reason` the stop string or
    stop token id that ended it (None for EOS), or the error's text.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Figures of a finished request, seconds on the monotonic clock."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_seconds: float
    time_to_first_token_seconds: float | None
    total_seconds: float
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0  # of these, that became tokens of the answer


class RequestDelta(NamedTuple):
    """New output of a request: deltas of the choices that advanced in one step.

    `prompt_logprobs` comes once, in the first delta, when asked for: one entry per prompt token, None for the first.
    `stats` comes with the last delta (when every choice has finished).
    """

    request_id: str
    choices: Sequence[ChoiceDelta]
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Whether a request would be served now, and why not."""

    alive: bool
    ready: bool
    reason: str | None = None  # "loading", "draining", "engine failed: …"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the engine that front ends show or check against; fixed once loaded.

    `details["scheduling_policy"]` names the scheduler's policy; the others say how the model was loaded.
    """

    model: str
    max_model_len: int
    vocab_size: int
    kv_capacity_tokens: int
    system_fingerprint: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Where an engine's time went (`engine.profile.profile_report`), and its last steps as trace events."""

    figures: dict[str, Any]
    trace: dict[str, Any]


Deliver = Callable[[RequestDelta | Exception], None]
"""Takes what is new for one request: a delta (the last has `stats`), or the error that ends it."""


class EngineClient(Protocol):
    """Asynchronous face of an engine; all methods are called on the event loop's thread."""

    @property
    def info(self) -> EngineInfo: ...

    def status(self) -> EngineStatus: ...

    def submit(self, request: EngineRequest, deliver: Deliver) -> Callable[[], None]:
        """Hands the request in; `deliver` is called with each of its deltas, on the event loop and in order.

        Instead of the last delta it may be given an error: InvalidRequestError if the request can never fit,
        QueueFullError if too much is waiting, DeadlineError if its deadline can't be met, EngineDeadError if the engine
        has failed (raised here if it has already). The reader calls what is returned once, when it leaves; if that is
        early, the request is aborted.
        """
        ...

    async def timeline(self, request_id: str) -> list[dict[str, Any]]:
        """The events of an unfinished request or one of the last finished ones, in order; empty for an unknown id.

        Each has `kind` (core/timeline.py lists them with their fields), `time` on the engine's clock, `seconds` since
        the request arrived and `choice`. The first is `arrived` and names the tenant.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a request of that id in any state: the last delta of each choice has finish reason abort. Unknown and
        finished ids are no matter.
        """
        ...

    async def set_tenants(self, tenants: TenantTable) -> None:
        """Replaces what the scheduler and the cache know of tenants; requests keep what they came in with."""
        ...

    async def start_profile(self) -> None:
        """Begins to time steps, afresh if it does so already. Raises InvalidRequestError where that can't be done."""
        ...

    async def stop_profile(self) -> ProfileReport:
        """Ends profiling. Raises InvalidRequestError if none was running."""
        ...

    async def close(self) -> None:
        """Aborts what runs and stops the engine."""
        ...


async def deltas_of(client: EngineClient, request: EngineRequest) -> AsyncIterator[RequestDelta]:
    """For a reader of one request: its deltas as they come, or the error. Closing the iterator early aborts the request."""
    arrived: asyncio.Queue[RequestDelta | Exception] = asyncio.Queue()
    leave = client.submit(request, arrived.put_nowait)
    try:
        while True:
            output = await arrived.get()
            if isinstance(output, Exception):
                raise output
            yield output
            if output.stats is not None:
                return
    finally:
        leave()
