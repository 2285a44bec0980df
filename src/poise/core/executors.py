"""Executors without a model: `ScriptedExecutor` draws fake tokens and checks each step.

Knows the two records of core/output only. Invariant: a token is a pure function of all tokens
before it, the seed and the choice, so whatever the schedule, the answer is the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from poise.core.block_pool import NULL_BLOCK_ID
from poise.core.output import (
    EngineSampling,
    KVGroupSpec,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)

Slot = tuple[int, int]


class ContractViolationError(Exception):
    """A step that a real executor would have answered with wrong bytes."""


class InjectedFailureError(Exception):
    """The failure that a test asked for."""


def scripted_token(
    token_ids: Sequence[int], sampling: EngineSampling, num_prompt_tokens: int, vocab_size: int
) -> int:
    """The next token: a hash of what is known, stop ids left out while min_tokens bans them."""
    content = struct.pack(f"<QI{len(token_ids)}I", sampling.seed, sampling.choice, *token_ids)
    digest = hashlib.blake2b(content, digest_size=8).digest()
    token_id = int.from_bytes(digest, "little") % vocab_size
    if len(token_ids) - num_prompt_tokens < sampling.params.min_tokens:
        assert len(sampling.stop_token_ids) < vocab_size
        while token_id in sampling.stop_token_ids:
            token_id = (token_id + 1) % vocab_size
    return token_id


def scripted_draft(
    token_ids: Sequence[int], sampling: EngineSampling, num_prompt_tokens: int, vocab_size: int
) -> int:
    """A guess at the next token that is right three times in four, and for min_tokens a little less."""
    token_id = scripted_token(token_ids, sampling, num_prompt_tokens, vocab_size)
    return token_id if sum(token_ids) % 4 else (token_id + 1) % vocab_size


@dataclass(slots=True)
class _Held:
    """One request. `prefixes[p]` names the tokens at 0 … p: what the slot of p must hold."""

    token_ids: list[int]
    prefixes: list[int]
    num_prompt_tokens: int
    sampling: EngineSampling
    block_tables: list[list[int]]
    end: int = 0  # positions before it have their KV in pages
    num_drafts: int = 0  # of token_ids, the last ones, while a step runs

    def take_drafts(self) -> list[int]:
        """The drafts, which are then no longer among the tokens."""
        cut = len(self.token_ids) - self.num_drafts
        drafts = self.token_ids[cut:]
        del self.token_ids[cut:], self.prefixes[cut:]
        self.num_drafts = 0
        return drafts

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.prefixes.append(hash((self.prefixes[-1] if self.prefixes else 0, token_id)))


class ScriptedExecutor:
    """Simulates KV pages: each slot (page, offset) holds the group and the prefix written there.

    Within a step all rows are written before any row attends, as in a real model's layers. `broken`
    are requests to report as broken, once they have no drafts; `fail_next` makes the next step raise after it has overwritten
    its pages with rubbish.
    """

    def __init__(
        self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int, vocab_size: int
    ) -> None:
        self.broken: set[int] = set()
        self.fail_next = False
        self._windows = tuple(group.sliding_window for group in groups)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._slots: dict[Slot, tuple[int, int] | None] = {}
        self._held: dict[int, _Held] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step; raises ContractViolationError if it could not be computed right."""
        self._take_requests(output)
        if sum(item.num_rows for item in output.scheduled) != output.num_tokens:
            raise ContractViolationError(
                f"num_tokens is {output.num_tokens}, the rows are not as many"
            )
        for item in output.scheduled:
            self._check_rows(item)
            self._append_drafts(item)
        self._write(output)
        if self.fail_next:
            self.fail_next = False
            raise InjectedFailureError(f"step {output.step}")
        for item in output.scheduled:
            self._attend(item)
        return self._answer(output)

    def _take_requests(self, output: SchedulerOutput) -> None:
        for request_id in output.removed_request_ids:
            self._held.pop(request_id, None)
        for new in output.new_requests:
            if new.request_id in self._held:
                raise ContractViolationError(
                    f"request {new.request_id} is new, but was not removed"
                )
            tables = [list(table) for table in new.block_tables]
            held = _Held([], [], new.num_prompt_tokens, new.sampling, tables)
            for token_id in new.token_ids:
                held.append(token_id)
            self._held[new.request_id] = held
        new_ids = {new.request_id for new in output.new_requests}
        for item in output.scheduled:
            if item.request_id not in self._held:
                raise ContractViolationError(f"request {item.request_id} is unknown")
            if item.request_id in new_ids and any(item.new_block_ids):
                raise ContractViolationError(f"request {item.request_id} is new and has new blocks")
            tables = self._held[item.request_id].block_tables
            for table, block_ids in zip(tables, item.new_block_ids, strict=True):
                table.extend(block_ids)
            if item.num_drafts:
                for table, block_ids in zip(tables, item.draft_block_ids, strict=True):
                    table.extend(block_ids)

    def _check_rows(self, item: ScheduledRequest) -> None:
        held = self._held[item.request_id]
        end = item.start + item.num_tokens
        name = f"request {item.request_id}, rows {item.start} … {end - 1}"
        if item.num_tokens <= 0 or end > len(held.token_ids):
            raise ContractViolationError(f"{name}: {len(held.token_ids)} tokens are known")
        if item.samples != (end == len(held.token_ids)):
            raise ContractViolationError(f"{name}: samples is {item.samples}")
        if item.start != held.end and item.start % self._block_size != 0:
            raise ContractViolationError(f"{name}: a jump from {held.end} that is no prefix hit")
        if item.start < held.end:
            raise ContractViolationError(f"{name}: computed up to {held.end} already")
        if item.num_drafts and not item.samples:
            raise ContractViolationError(f"{name}: drafts, but no token is drawn")
        if len(item.draft_token_ids) not in (0, item.num_drafts):
            raise ContractViolationError(f"{name}: {item.num_drafts} drafts are announced")
        for table in held.block_tables:
            if len(table) * self._block_size < end + item.num_drafts:
                raise ContractViolationError(f"{name}: a block table of {len(table)} blocks")
            if any(b != NULL_BLOCK_ID and not 0 <= b < self._num_blocks for b in table):
                raise ContractViolationError(f"{name}: a block id outside the pool")

    def _append_drafts(self, item: ScheduledRequest) -> None:
        """Drafts stand behind the known tokens until the step's tokens are drawn."""
        held = self._held[item.request_id]
        held.num_drafts = item.num_drafts
        for place in range(item.num_drafts):
            held.append(
                item.draft_token_ids[place]
                if item.draft_token_ids
                else scripted_draft(
                    held.token_ids, held.sampling, held.num_prompt_tokens, self._vocab_size
                )
            )

    def _write(self, output: SchedulerOutput) -> None:
        """All rows' KV. Each slot is written once, and none that an earlier step made visible."""
        written: set[Slot] = set()
        reached = self._slots_in_reach()
        for item in output.scheduled:
            held = self._held[item.request_id]
            for group, position, slot in self._visible_slots(
                held, item.start, item.start + item.num_rows
            ):
                if position < item.start:
                    continue
                if slot in written or slot in reached:
                    raise ContractViolationError(
                        f"request {item.request_id} writes to a shared slot {slot}"
                    )
                if slot[0] == NULL_BLOCK_ID:
                    raise ContractViolationError(
                        f"request {item.request_id} writes position {position} to a null page"
                    )
                written.add(slot)
                self._slots[slot] = None if self.fail_next else (group, held.prefixes[position])

    def _slots_in_reach(self) -> set[Slot]:
        """Slots written in earlier steps that some request will still attend to."""
        return {
            slot
            for held in self._held.values()
            for _, _, slot in self._visible_slots(held, held.end, held.end)
        }

    def _visible_slots(self, held: _Held, start: int, end: int) -> Iterator[tuple[int, int, Slot]]:
        """(group, position, slot) of all that rows from `start` on see before position `end`."""
        for group, (window, table) in enumerate(zip(self._windows, held.block_tables)):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                block, offset = divmod(position, self._block_size)
                yield group, position, (table[block], offset)

    def _attend(self, item: ScheduledRequest) -> None:
        held = self._held[item.request_id]
        held.end = item.start + item.num_tokens
        end = item.start + item.num_rows
        for group, position, slot in self._visible_slots(held, item.start, end):
            if self._slots.get(slot) != (group, held.prefixes[position]):
                raise ContractViolationError(
                    f"request {item.request_id}, group {group}: page {slot[0]} holds something else "
                    f"at position {position}"
                )

    def _answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        token_ids: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        broken = set()
        for item in output.scheduled:
            held = self._held[item.request_id]
            params = held.sampling.params
            drafts = held.take_drafts()
            if params.prompt_logprobs is not None:
                last = min(item.start + item.num_tokens, held.num_prompt_tokens - 1)
                prompt_logprobs[item.request_id] = [
                    self._logprob(held, p) for p in range(item.start + 1, last + 1)
                ]
            if not item.samples:
                continue
            if item.request_id in self.broken:
                if item.num_drafts:
                    token_ids[item.request_id] = []
                    self._undo(held, item)
                else:
                    broken.add(item.request_id)
                continue
            drawn = token_ids[item.request_id] = self._draw(held, drafts)
            if params.logprobs is not None:
                logprobs[item.request_id] = [
                    self._logprob(held, len(held.token_ids) - place)
                    for place in range(len(drawn), 0, -1)
                ]
            if item.num_drafts:
                self._settle(held, len(drawn) - 1)
        return ModelRunnerOutput(token_ids, logprobs, prompt_logprobs, frozenset(broken))

    def _draw(self, held: _Held, drafts: Sequence[int]) -> list[int]:
        """Tokens up to the first that is not the draft in its place."""
        drawn: list[int] = []
        while drawn == list(drafts[: len(drawn)]) and len(drawn) <= len(drafts):
            drawn.append(
                scripted_token(
                    held.token_ids, held.sampling, held.num_prompt_tokens, self._vocab_size
                )
            )
            held.append(drawn[-1])
        return drawn

    def _undo(self, held: _Held, item: ScheduledRequest) -> None:
        """What the step has written is spoilt."""
        for _, position, slot in list(self._visible_slots(held, item.start, held.end)):
            if position >= item.start:
                self._slots[slot] = None
        held.end = item.start
        self._trim(held)

    def _settle(self, held: _Held, num_accepted: int) -> None:
        """Accepted drafts have their KV in pages; pages past it are no longer the request's."""
        held.end += num_accepted
        self._trim(held)

    def _trim(self, held: _Held) -> None:
        for table in held.block_tables:
            del table[-(-held.end // self._block_size) :]

    def _logprob(self, held: _Held, position: int) -> TokenLogprobs:
        """A made-up value that only the prefix decides."""
        return TokenLogprobs(held.token_ids[position], -(held.prefixes[position] % 997) / 100, 1)
