"""The door: which requests may join at all, which may join now, and whose deadline has passed.

Knows limits, quotas and the load, no order and no steps. Invariant: a request that came in could be
served if it were alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from poise.core.admission import Admission, Forecast, Load
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.limits import Limits
from poise.core.request import Request
from poise.core.reservations import Reservations
from poise.errors import InvalidRequestError


class Intake:
    """Checks arrivals and remembers deadlines."""

    def __init__(
        self,
        limits: Limits,
        kv_cache: KVCacheManager,
        reservations: Reservations,
        admission: Admission,
    ) -> None:
        self._limits = limits
        self._kv_cache = kv_cache
        self._reservations = reservations
        self._admission = admission
        self._deadlines: list[tuple[float, int]] = []  # a heap; finished requests may be in it

    def check(self, requests: Sequence[Request], now: float, load: Load) -> Forecast:
        """Lets the choices of one request in, which are alike, and predicts when they'll be served.

        Raises InvalidRequestError if they could never fit, QueueFullError if too much is waiting,
        DeadlineError if they would miss their deadline.
        """
        first = requests[0]
        try:
            self._check_fits(first)
        except InvalidRequestError:
            self._admission.count("refused", "never_fits", len(requests))
            raise
        num_tokens, deadline = first.num_prompt_tokens, first.owner.deadline
        self._admission.check_queue(now, load, len(requests), num_tokens * len(requests))
        forecast = self._admission.drain.forecast(load, num_tokens, first.max_tokens)
        if deadline is not None:
            self._admission.check_deadline(now, load, deadline, first, forecast)
            for request in requests:
                heapq.heappush(self._deadlines, (deadline, request.request_id))
        self._admission.count("accepted", "ok", len(requests))
        return forecast

    def _check_fits(self, request: Request) -> None:
        num_prompt_tokens, max_tokens = request.num_prompt_tokens, request.max_tokens
        if num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt has no tokens; send at least one", "prompt")
        num_tokens = num_prompt_tokens + max_tokens
        asked = (
            f"{num_prompt_tokens} prompt tokens + {max_tokens} output tokens = {num_tokens} tokens"
        )
        longest = self._limits.max_model_len
        if num_tokens > longest:
            raise InvalidRequestError(
                f"{asked} exceed the context of {longest}; shorten the prompt or lower max_tokens",
                "max_tokens" if num_prompt_tokens < longest else "prompt",
                "context_length_exceeded",
            )
        need = self._kv_cache.num_blocks_needed(num_tokens, self._limits.max_num_batched_tokens)
        quota = self._reservations.quotas.get(request.tenant)
        for most, whose, enlarge in (
            (self._kv_cache.pool.num_blocks, "the cache has", "enlarge the KV cache"),
            (quota, "this tenant may hold", "ask for a larger KV quota"),
        ):
            if most is not None and need > most:
                raise InvalidRequestError(
                    f"{asked} need {need} KV blocks of {self._kv_cache.block_size} tokens, {whose} "
                    f"{most}; shorten the prompt, lower max_tokens or {enlarge}",
                    "max_tokens",
                    "context_length_exceeded",
                )

    @property
    def has_deadlines(self) -> bool:
        return bool(self._deadlines)

    def overdue(self, now: float) -> list[int]:
        """Ids whose deadline has passed, each once; some may have finished before it."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            found.append(heapq.heappop(self._deadlines)[1])
        return found
