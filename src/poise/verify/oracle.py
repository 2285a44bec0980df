"""The uncached twin: the slow and obvious way to an answer.

No scheduler, no cache, no page that is ever kept: at every step the whole prefix is computed again, alone,
from position 0. Invariant: nothing is carried from one token to the next but the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from poise.core.output import (
    EngineSampling,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from poise.core.speculation import SpeculationOffer
from poise.engine.client import EngineRequest
from poise.engine.input_processor import InputProcessor
from poise.executor.load import LoadedExecutor
from poise.tokenizer.tokenizer import Tokenizer
from poise.verify.answers import Answer, ChoiceAnswer, Probe, Token, token, tokens

REQUEST_ID = 1 << 40  # no engine that shares the executor comes this far


def recompute(
    loaded: LoadedExecutor, tokenizer: Tokenizer, probe: Probe, longest_step: int
) -> Answer:
    """The answer to a probe; without text. A prefix longer than `longest_step` tokens takes several steps."""
    inputs = InputProcessor(
        tokenizer,
        vocab_size=loaded.vocab_size,
        max_total_tokens=loaded.max_model_len,
        speculation=SpeculationOffer(),
    )
    request = EngineRequest(probe.name, probe.token_ids, probe.params, probe.seed)
    prompt: tuple[Token, ...] = ()
    choices = []
    for sampling in inputs.process(request):
        answer, scored = _recompute_choice(loaded, probe.token_ids, sampling, longest_step)
        prompt = prompt or scored
        choices.append(answer)
    return Answer(tuple(choices), prompt)


def _recompute_choice(
    loaded: LoadedExecutor,
    prompt_ids: tuple[int, ...],
    sampling: EngineSampling,
    longest_step: int,
) -> tuple[ChoiceAnswer, tuple[Token, ...]]:
    """The choice, and the prompt's log-probabilities where they were asked for."""
    params = sampling.params
    assert params.max_tokens is not None, "the input processor resolves max_tokens"
    ids = list(prompt_ids)
    made: list[Token] = []
    scored: tuple[Token, ...] = ()
    reason = "length"
    while len(made) < params.max_tokens:
        entries: list[TokenLogprobs] = []
        for step in _whole_prefix(loaded, ids, len(prompt_ids), sampling, longest_step):
            result = loaded.executor.execute(step)
            entries += result.prompt_logprobs.get(REQUEST_ID, [])
        if REQUEST_ID in result.broken:
            reason = "error"
            break
        scored = scored or tokens([entry.token_id for entry in entries], entries)
        [drawn] = result.token_ids[REQUEST_ID]
        logprobs = result.logprobs.get(REQUEST_ID)
        made.append(Token(drawn) if logprobs is None else token(logprobs[0]))
        ids.append(drawn)
        if drawn in sampling.stop_token_ids and len(made) >= params.min_tokens:
            reason = "stop"
            break
    return ChoiceAnswer(tuple(made), reason), scored


def _whole_prefix(
    loaded: LoadedExecutor,
    ids: list[int],
    num_prompt_tokens: int,
    sampling: EngineSampling,
    longest_step: int,
) -> Iterator[SchedulerOutput]:
    """Steps that know nothing of any step before them; each KV group gets pages of its own."""
    groups, count = len(loaded.kv_groups), -(-len(ids) // loaded.block_size)
    tables = tuple(tuple(range(group * count, (group + 1) * count)) for group in range(groups))
    new = NewRequest(REQUEST_ID, tuple(ids), num_prompt_tokens, sampling, tables)
    for start in range(0, len(ids), longest_step):
        num_tokens = min(longest_step, len(ids) - start)
        samples = start + num_tokens == len(ids)
        rows = ScheduledRequest(REQUEST_ID, start, num_tokens, ((),) * groups, samples)
        if start == 0:
            yield SchedulerOutput(0, (REQUEST_ID,), (new,), (rows,), num_tokens)
        else:
            yield SchedulerOutput(0, (), (), (rows,), num_tokens)
