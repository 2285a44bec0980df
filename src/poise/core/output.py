"""The two records that cross between scheduler and executor, and the protocol of an executor.

Nothing else crosses. Plain Python only: no arrays, no text. One list element per request, in row order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from poise.core.sampling_params import SamplingParams
from poise.core.speculation import Speculation


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers whose KV shares a lifetime: one block table per group and request."""

    name: str
    num_layers: int
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class EngineSampling:
    """Sampling parameters resolved for one choice: seed drawn, stop ids joined, bad words tokenised.

    `stop_token_ids` end the answer (EOS ids are in it unless ignore_eos); `min_tokens` bans exactly these.
    `seed` is 0 … 2**64-1. `speculation` None: nothing is drafted.
    """

    params: SamplingParams
    seed: int
    choice: int
    stop_token_ids: frozenset[int]
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the executor does not hold: first scheduling, or resumption after preemption.

    `token_ids` are all known tokens (the prompt, and on resumption the output so far); the first
    `num_prompt_tokens` of them are the prompt. `block_tables` has one list of block ids per KV group.
    """

    request_id: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: EngineSampling
    block_tables: tuple[tuple[int, ...], ...]


NO_TOKEN: Final = -1


class ScheduledRequest(NamedTuple):
    """Rows of one request in this step: `num_tokens` known tokens from absolute position `start`, then drafts.

        rows   | known tokens ......... | drafts ......... |
               start                    start + num_tokens start + num_rows

    `new_block_ids` (one tuple per KV group) are appended to the block tables the executor holds; empty for a
    request that is in `new_requests` of the same step. The row of the last token samples iff `samples` (it is the
    last known one); the executor then appends the drawn token to the tokens it knows.

    Only a request that samples has drafts, and then the row of each draft samples too, as if the drafts before it
    were known: its draw counts while all drafts before it equal what was drawn for them. `draft_token_ids`
    are the `num_drafts` drafts, or empty: the executor makes them. `draft_block_ids` are appended after
    `new_block_ids`. When the step has returned, scheduler and executor alike drop the pages of a request with
    drafts that lie past its last token but one, the last whose KV is computed. `unplaced_draft` stands where the
    last row's token goes and has no row: it decides what is drawn where acceptance is by rejection, and nothing else.
    """

    request_id: int
    start: int
    num_tokens: int
    new_block_ids: tuple[tuple[int, ...], ...]
    samples: bool
    num_drafts: int = 0
    draft_token_ids: tuple[int, ...] = ()
    draft_block_ids: tuple[tuple[int, ...], ...] = ()
    unplaced_draft: int = NO_TOKEN

    @property
    def num_rows(self) -> int:
        return self.num_tokens + self.num_drafts


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `removed_request_ids` (finished, aborted, preempted) are forgotten before anything else.

    `num_tokens` are all rows, those of drafts included.
    """

    step: int
    removed_request_ids: Sequence[int]
    new_requests: Sequence[NewRequest]
    scheduled: Sequence[ScheduledRequest]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own value and rank (1 is best), then the best k in order."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step produced, by request id.

    `token_ids`: tokens drawn (absent for a request that did not sample): accepted drafts, then one more. `logprobs`: one entry per drawn token, for
    requests that asked. `prompt_logprobs`: entries for prompt positions start+1 … (a row at position p scores token p+1).
    `broken`: requests whose logits held a NaN or +Inf; no token was drawn. Where that may come from a draft's row, the
    request has no token (`token_ids` holds an empty list): all its rows of the step have to be computed again, without drafts.
    `draft_seconds`: of the step, spent on making drafts.
    """

    token_ids: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    broken: frozenset[int] = frozenset()
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What an executor's steps read and computed so far, by its model of them, and the seconds they took.

    `spared_keys`: keys (of one KV group) that a sequence did not read for itself, since the pass of another over the same
    blocks served it.
    """

    read_bytes: int
    flops: int
    seconds: float
    spared_keys: int = 0


class Executor(Protocol):
    """Runs steps. Real: executor/model_runner; for tests: core/executors."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step; an exception means that nothing of the step may be trusted."""
        ...
