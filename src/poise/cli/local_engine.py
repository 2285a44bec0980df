"""One request at a time on an engine in this process, for `generate` and `chat`.

Knows nothing of HTTP. Invariant: Ctrl-C takes effect between steps, and a request that is left early is aborted.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from poise.config import Settings
from poise.core.sampling_params import SamplingParams
from poise.core.tenant import NO_TENANTS, TenantTable
from poise.engine.client import EngineRequest, RequestDelta

if TYPE_CHECKING:
    from poise.engine.llm_engine import LLMEngine

_keys = itertools.count()


class AnswerStoppedError(Exception):
    """Ctrl-C stopped the answer between two steps; the engine is whole."""


def load_local_engine(settings: Settings) -> LLMEngine:
    """An engine for this command alone: whatever it hands over waits its turn."""
    return load_engine(replace(settings, scheduler=settings.scheduler.without_queue_bounds()))


def load_engine(settings: Settings, tenants: TenantTable = NO_TENANTS) -> LLMEngine:
    """Builds the engine; a model that must be pulled first shows its progress on stderr."""
    from rich.console import Console

    from poise.engine.build import build_engine

    return build_engine(
        settings.source,
        settings.cache,
        settings.scheduler,
        settings.compute,
        tenants=tenants,
        speculation=settings.speculation,
        console=Console(stderr=True),
    )


def stream(
    engine: LLMEngine, token_ids: Sequence[int], params: SamplingParams, seed: int
) -> Iterator[RequestDelta]:
    """Deltas of one request as they come. Raises InvalidRequestError if it can't be served, AnswerStoppedError after Ctrl-C."""
    key = next(_keys)
    engine.add_request(key, EngineRequest(f"cli-{key}", tuple(token_ids), params, seed))
    finished = False
    try:
        with _interrupt_between_steps() as check:
            while not finished:
                for _, delta in engine.step():
                    finished = delta.stats is not None
                    yield delta
                check()
    finally:
        if not finished:
            engine.abort(key)
            engine.take_outputs()


def printable(text: str) -> str:
    """The text with control characters made visible: what a model says must not steer the terminal."""
    return "".join(
        character if character in "\n\t" or ord(character) >= 32 else "\N{REPLACEMENT CHARACTER}"
        for character in text.replace("\x7f", "\x00")
    )


class _Check:
    """Raises AnswerStopped when called after a Ctrl-C."""

    def __init__(self) -> None:
        self.interrupted = False

    def __call__(self) -> None:
        if self.interrupted:
            raise AnswerStoppedError


@contextmanager
def _interrupt_between_steps() -> Iterator[_Check]:
    """Remembers the first Ctrl-C instead of raising inside a step; a second one is a KeyboardInterrupt at once."""
    check = _Check()

    def remember(signal_number: int, frame: FrameType | None) -> None:
        if check.interrupted:
            raise KeyboardInterrupt
        check.interrupted = True

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
