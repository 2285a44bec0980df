"""The tokens of one step: a row for every request that decodes, the rest for prompts.

Knows running requests and the time model, no pages and no queue. Invariant: every decoding request's row
is set aside before a prompt gets a token, and the oldest running request can always have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from poise.core.limits import Limits
from poise.core.request import Request
from poise.core.reservations import TokenClaims
from poise.core.step_time import StepShape, StepTimeModel

LEAST_PREFILL: Final = 4
"""Prompt tokens that a step takes even if the decoding requests alone miss their target: prompts must end too."""


class StepBudget:
    """What is left of a step's tokens while it is being built.

    `num_left` is the total; what prompts may take is worked out when the first one asks. `_owed` is the oldest
    request if it has a prompt to compute and no rows yet: one token is kept for it.
    """

    def __init__(
        self,
        limits: Limits,
        running: Sequence[Request],
        step_time: StepTimeModel,
        claims: TokenClaims | None = None,
    ) -> None:
        self._limits = limits
        self._running = running
        self._step_time = step_time
        self._claims = claims
        self._prefill_left: int | None = None
        self._owed = running[0] if running and _is_prefilling(running[0]) else None
        self.num_left = limits.max_num_batched_tokens

    def for_prefill(self, request: Request, *, is_shared: bool) -> int:
        """Most prompt tokens that the request may compute now; 0 if none are left.

        `is_shared`: others want some, so a long one is cut to the threshold.
        """
        if self._prefill_left is None:
            self._prefill_left = self._prefill_limit(request)
        most = self._prefill_left
        if self._claims is not None:
            most -= self._claims.held_for_others(request)
        threshold = self._limits.long_prefill_token_threshold
        if threshold and is_shared:
            most = min(most, threshold)
        if request is self._owed:
            most = max(most, min(1, self._prefill_left))
        elif self._owed is not None:
            most = min(most, self._prefill_left - 1)
        return max(0, most)

    def _prefill_limit(self, request: Request) -> int:
        """What decoding requests leave, in tokens and in time."""
        decoding = [r for r in self._running if r.num_tokens - r.num_computed_tokens == 1]
        limit = self._limits.max_num_batched_tokens - len(decoding)
        target = self._limits.target_itl_seconds
        if target is None or not decoding:
            return limit
        num_keys = sum(self._step_time.keys(r.num_computed_tokens, 1) for r in decoding)
        decodes = StepShape(len(decoding), 0, num_keys, len(decoding))
        start = request.num_computed_tokens
        fitting = self._step_time.largest_prefill(decodes, start, target, limit)
        return max(fitting, min(limit, LEAST_PREFILL))

    def spend(self, request: Request, num_tokens: int, is_prefill: bool) -> None:
        self.num_left -= num_tokens
        if request is self._owed:
            self._owed = None
        if is_prefill:
            assert self._prefill_left is not None
            self._prefill_left -= num_tokens
            if self._claims is not None:
                self._claims.spend(request, num_tokens)

    @property
    def has_prefill_left(self) -> bool:
        """Whether any prompt could still get a token."""
        return self.num_left > 0 and (self._prefill_left is None or self._prefill_left > 0)

    @property
    def num_spent(self) -> int:
        return self._limits.max_num_batched_tokens - self.num_left


def _is_prefilling(request: Request) -> bool:
    return request.num_tokens - request.num_computed_tokens > 1
