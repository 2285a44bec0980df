"""What the tests of the engine share: a tokenizer whose tokens are bytes, executors that follow a
script, an engine over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from poise.core.clock import ManualClock
from poise.core.drafting import Draft, Drafter, DraftRoom
from poise.core.executors import ScriptedExecutor
from poise.core.kv_cache_manager import KVCacheManager
from poise.core.limits import Limits
from poise.core.output import (
    Executor,
    KVGroupSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from poise.core.policy import FCFS, Policy
from poise.core.prefix_cache import PrefixCache
from poise.core.request import Request
from poise.core.sampling_params import SamplingParams
from poise.core.scheduler import Scheduler
from poise.core.speculation import SpeculationOffer
from poise.core.step_time import StepShape, StepTimeModel
from poise.core.tenant import NO_TENANTS, TenantTable
from poise.engine.client import ChoiceDelta, EngineInfo, EngineRequest, RequestDelta
from poise.engine.llm_engine import NO_SPECULATION, LLMEngine
from poise.engine.metrics import EngineMetrics

GROUPS = (KVGroupSpec("full", 4),)
EOS = 256
SPECIAL = 257
VOCAB_SIZE = 258
BLOCK_SIZE = 4


class ByteTokenizer:
    """Ids 0 … 255 are bytes; 256 ends an answer; 257 is another control token."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    special_ids = frozenset((EOS, SPECIAL))
    decoding = SimpleNamespace(byte_level=True)
    bytes_by_id = (*(bytes([byte]) for byte in range(256)), b"<eos>", b"<special>")

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.bytes_by_id[i] for i in ids if i not in hidden)
        return text.decode(errors="replace")

    def encode_chat(self, messages: Sequence[Any], **options: Any) -> list[int]:
        return list("".join(f"[{m['role']}]{m['content']}" for m in messages).encode())

    def token_text(self, token: int) -> str:
        return self.bytes_by_id[token].decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return self.bytes_by_id[token]


class TypingExecutor:
    """Types the text that `answer` gives for a prompt, byte by byte, then EOS; `fail` may raise
    before a step.
    """

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self.answer_choice: Callable[[bytes, int], bytes] = lambda prompt, choice: answer(prompt)
        self.fail: Callable[[SchedulerOutput], None] = lambda output: None
        self._held: dict[int, tuple[list[int], Any]] = {}  # prompt, sampling
        self._known: dict[int, int] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.fail(output)
        for new in output.new_requests:
            prompt = list(new.token_ids[: new.num_prompt_tokens])
            self._held[new.request_id] = (prompt, new.sampling)
            self._known[new.request_id] = len(new.token_ids) - new.num_prompt_tokens
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for item in output.scheduled:
            if not item.samples:
                continue
            prompt, sampling = self._held[item.request_id]
            text = self.answer_choice(bytes(prompt), sampling.choice)
            place = self._known[item.request_id]
            drawn: list[int] = []
            while (
                drawn == list(item.draft_token_ids[: len(drawn)]) and len(drawn) <= item.num_drafts
            ):
                drawn.append(text[place] if place < len(text) else EOS)
                place += 1
            tokens[item.request_id] = drawn
            self._known[item.request_id] = place
            if sampling.params.logprobs is not None:
                first = place - len(drawn)
                logprobs[item.request_id] = [
                    TokenLogprobs(token, -float(first + i), 1, ((token, 0.0),))
                    for i, token in enumerate(drawn)
                ]
        return ModelRunnerOutput(tokens, logprobs)


class TypingDrafter:
    """Drafts the text that a TypingExecutor types for every prompt, as much as may be."""

    def __init__(self, text: bytes) -> None:
        self._text = [*text, EOS]

    def draft(
        self, rooms: Sequence[DraftRoom], shape: StepShape, step_time: StepTimeModel
    ) -> list[Draft]:
        texts = [self._text[room.request.num_output_tokens :][: room.most] for room in rooms]
        return [Draft(len(text), tuple(text)) for text in texts]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


@dataclass
class Answer:
    """All deltas of one choice, joined; checks that only the last one finishes."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def append(self, delta: ChoiceDelta) -> None:
        assert self.finish_reason is None
        self.text += delta.text
        self.token_ids += tuple(delta.token_ids)
        self.logprobs += tuple(delta.logprobs or ())
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


def join(deltas: Sequence[RequestDelta]) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    for number, delta in enumerate(deltas):
        assert (delta.stats is not None) == (number == len(deltas) - 1)
        for choice in delta.choices:
            answers.setdefault(choice.index, Answer()).append(choice)
    return answers


def make_engine(
    executor: Executor | None = None,
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 200,
    caching: bool = True,
    clock: ManualClock | None = None,
    policy: Policy = FCFS,
    tenants: TenantTable = NO_TENANTS,
    drafter: Drafter | None = None,
    **limits: Any,
) -> LLMEngine:
    clock = clock or ManualClock()
    cache = (
        PrefixCache(key=b"key", identity=b"model", block_size=BLOCK_SIZE, num_groups=1)
        if caching
        else None
    )
    scheduler = Scheduler(
        KVCacheManager(GROUPS, num_blocks, BLOCK_SIZE, cache),
        clock,
        Limits(max_num_seqs, max_num_batched_tokens, max_model_len, **limits),
        policy=policy,
        tenants=tenants,
        drafter=drafter,
    )
    info = EngineInfo(
        "bytes",
        max_model_len,
        VOCAB_SIZE,
        num_blocks * BLOCK_SIZE,
        "poise-v1-test",
        {"scheduling_policy": "fcfs"},
    )
    return LLMEngine(
        scheduler,
        executor or ScriptedExecutor(GROUPS, num_blocks, BLOCK_SIZE, VOCAB_SIZE),
        ByteTokenizer(),  # type: ignore[arg-type]
        info=info,
        metrics=EngineMetrics(
            "bytes", max_model_len=max_model_len, num_blocks=num_blocks, cache_config={}
        ),
        clock=clock,
        speculation=NO_SPECULATION if drafter is None else SpeculationOffer(),
    )


def request(prompt: str | bytes = "hello", request_id: str = "r", **params: Any) -> EngineRequest:
    token_ids = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
    resolved = SamplingParams(**params)
    return EngineRequest(request_id, token_ids, resolved, resolved.seed or 0)


def run(engine: LLMEngine, *requests: EngineRequest) -> list[dict[int, Answer]]:
    """Runs the requests together to their end; their answers in order."""
    deltas: dict[int, list[RequestDelta]] = {key: [] for key in range(len(requests))}
    for key, item in enumerate(requests):
        engine.add_request(key, item)
    while engine.has_unfinished_requests():
        for key, delta in engine.step():
            deltas[key].append(delta)
        engine._scheduler.check_invariants()
    assert_idle(engine)
    return [join(deltas[key]) for key in range(len(requests))]


def assert_idle(engine: LLMEngine) -> None:
    """Nothing runs, nothing is kept, every block is free."""
    assert not engine._requests
    assert not engine._choices
    assert not engine._touched
    engine._scheduler.check_invariants()
    stats = engine._scheduler.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_total_blocks
