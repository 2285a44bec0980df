"""Who drafts for a request, and how many of the drafts are worth their rows.

Puts proposers and the controller of draft lengths together; knows neither pages nor acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from poise.core.drafting import NO_DRAFT, Draft, DraftRoom, is_pinned
from poise.core.request import Request
from poise.core.speculation import Speculation
from poise.core.step_time import StepShape, StepTimeModel
from poise.spec_decode.lookup import LookupProposer


class Candidate(NamedTuple):
    """A request that could verify up to `most` drafts in this step; its known tokens end before `position`."""

    request_id: int
    position: int
    most: int
    is_drafted_by_executor: bool


class LengthController(Protocol):
    """Chooses how many drafts each request verifies, for the sake of the whole batch."""

    def choose(
        self, candidates: Sequence[Candidate], shape: StepShape, step_time: StepTimeModel
    ) -> Sequence[int]:
        """0 … most for each candidate. `shape` is the step without any of their drafts."""
        ...

    def observe(self, request_id: int, num_drafts: int, num_accepted: int) -> None: ...

    def forget(self, request_id: int) -> None: ...


class SpeculativeDrafter:
    """The drafter of an engine (see `core.drafting.Drafter`). Without a controller lengths are fixed."""

    def __init__(self, controller: LengthController | None = None) -> None:
        self._lookup = LookupProposer()
        self._pinned = PinnedDrafts()
        self._controller = controller

    def draft(
        self, rooms: Sequence[DraftRoom], shape: StepShape, step_time: StepTimeModel
    ) -> Sequence[Draft]:
        drafts = [self._propose(room) for room in rooms]
        if self._controller is None:
            return drafts
        chosen = [
            i for i, room in enumerate(rooms) if drafts[i].num_tokens and is_adaptive(room.request)
        ]
        if not chosen:
            return drafts
        for i, (room, draft) in enumerate(zip(rooms, drafts)):
            if i not in chosen:
                start = room.request.num_tokens
                shape = step_time.with_drafts(shape, start, min(draft.num_tokens, room.most))
        lengths = self._controller.choose(
            [self._candidate(rooms[i].request, drafts[i]) for i in chosen],
            shape,
            step_time,
        )
        for i, length in zip(chosen, lengths, strict=True):
            drafts[i] = drafts[i].cut(length) if length else NO_DRAFT
        return drafts

    def _propose(self, room: DraftRoom) -> Draft:
        speculation = room.request.sampling.speculation
        assert speculation is not None
        if is_pinned(room.request):
            return self._pinned.draft(room.request, speculation, self._lookup)
        if speculation.method in ("ngram", "suffix"):
            token_ids = self._lookup.propose(room.request, speculation, room.most)
            return Draft(len(token_ids), token_ids)
        num_unknown = room.request.num_tokens - room.request.num_computed_tokens
        return Draft(room.most) if num_unknown == 1 else NO_DRAFT  # no prompt is computed twice

    def _candidate(self, request: Request, draft: Draft) -> Candidate:
        return Candidate(
            request.request_id, request.num_tokens, draft.num_tokens, not draft.token_ids
        )

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        if self._controller is not None and is_adaptive(request):
            self._controller.observe(request.request_id, num_drafts, num_accepted)

    def forget(self, request: Request) -> None:
        self._lookup.forget(request)
        self._pinned.forget(request)
        if self._controller is not None:
            self._controller.forget(request.request_id)


class PinnedDrafts:
    """Drafts that don't depend on a step's room: what was drafted from a text stays until it is used up or refuted.

    Invariant: which draft stands at a position is a function of the request's tokens before it.
    """

    def __init__(self) -> None:
        self._runs: dict[int, tuple[int, tuple[int, ...]]] = {}  # position of the first, and all

    def draft(self, request: Request, speculation: Speculation, lookup: LookupProposer) -> Draft:
        """What is left of the run that the text has followed so far, none right behind its end, or a new run."""
        run = self._runs.get(request.request_id)
        if run is not None:
            start, token_ids = run
            followed = tuple(request.token_ids[start:])
            if followed == token_ids[: len(followed)]:
                left = token_ids[len(followed) :]
                return Draft(len(left), left)
        token_ids = lookup.propose(request, speculation, speculation.num_speculative_tokens)
        self._runs[request.request_id] = request.num_tokens, token_ids
        return Draft(len(token_ids), token_ids)

    def forget(self, request: Request) -> None:
        self._runs.pop(request.request_id, None)


def is_adaptive(request: Request) -> bool:
    """Whether a controller chooses its draft lengths: where a draft can't change the answer's law or bytes."""
    speculation = request.sampling.speculation
    return speculation is not None and speculation.adaptive and speculation.acceptance == "coupled"
