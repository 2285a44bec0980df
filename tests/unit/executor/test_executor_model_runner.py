"""Steps through the real executor: what is drawn, reported and broken, and that neighbours keep their bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from native_models import load, tiny_gguf
from scheduler_outputs import new, output, rows

from poise.config import CacheConfig, ComputeConfig, SchedulerConfig
from poise.core.output import ScheduledRequest
from poise.errors import ConfigError
from poise.executor.load import load_executor
from poise.kernels.cpu import available_isas
from poise.weights.open_checkpoint import open_checkpoint
from tiny_models import TinyModel, write_safetensors_folder

ISAS = available_isas()
BROKEN_TOKEN = 100


@dataclass(frozen=True)
class NaNEmbedding(TinyModel):
    """Token BROKEN_TOKEN has a NaN in its embedding."""

    def weights(self):
        weights = super().weights()
        weights["embed"][BROKEN_TOKEN, 3] = np.nan
        return weights


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory):
    return write_safetensors_folder(tmp_path_factory.mktemp("nan") / "model", NaNEmbedding())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def greedy(request_id, ids, blocks, **params):
    return new(request_id, ids, blocks, temperature=0, logprobs=5, **params)


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_embedding_ends_its_request_alone(broken_model, isa, monkeypatch):
    ids = {1: [5, 6, 7], 2: [5, BROKEN_TOKEN, 7], 3: [9, 10, 11, 12]}

    def step_of(*requests):
        executor = load(broken_model, monkeypatch, isa, threads=2).executor
        first = [greedy(r, ids[r], [r]) for r in requests]
        results = [
            executor.execute(
                output([rows(r, 0, len(ids[r]), samples=True) for r in requests], first)
            )
        ]
        healthy = [r for r in requests if r not in results[0].broken]
        again = [rows(r, len(ids[r]), 1, samples=True) for r in healthy]
        results.append(executor.execute(output(again, removed=results[0].broken)))
        return results

    together, later = step_of(1, 2, 3)
    assert together.broken == {2}
    assert set(together.token_ids) == set(together.logprobs) == {1, 3}
    assert later.broken == frozenset()
    for request in (1, 3):
        alone, alone_later = step_of(request)
        for ours, theirs in ((together, alone), (later, alone_later)):
            assert ours.token_ids[request] == theirs.token_ids[request]
            assert ours.logprobs[request] == theirs.logprobs[request]


def test_a_nan_among_prompt_logprobs_breaks_the_request(broken_model, monkeypatch):
    executor = load(broken_model, monkeypatch, ISAS[-1]).executor
    request = new(1, [5, BROKEN_TOKEN, 7], [0], prompt_logprobs=1)
    result = executor.execute(output([rows(1, 0, 2)], [request]))
    assert result.broken == {1}
    assert result.token_ids == {}


def test_a_nan_of_a_draft_breaks_nothing(broken_model, monkeypatch):
    executor = load(broken_model, monkeypatch, ISAS[-1]).executor
    ids = [5, 6, 7]
    first = output([rows(1, 0, 3, samples=True)], [greedy(1, ids, [0, 1])])
    [drawn] = executor.execute(first).token_ids[1]
    plain = executor.execute(output([rows(1, 3, 1, samples=True)]))
    drafted = ScheduledRequest(2, 0, 3, ((),), True, 2, (drawn, BROKEN_TOKEN), ((3,),))
    result = executor.execute(output([drafted], [greedy(2, ids, [2])]))
    assert result.token_ids == {2: []}  # the NaN is in all rows of the block: again, without drafts
    assert result.broken == frozenset()
    result = executor.execute(output([rows(2, 0, 3, blocks=[2], samples=True)]))
    assert result.token_ids == {2: [drawn]}
    result = executor.execute(output([rows(2, 3, 1, samples=True)]))
    assert (result.token_ids[2], result.logprobs[2]) == (plain.token_ids[1], plain.logprobs[1])
    assert executor.execute(output([rows(2, 4, 1, samples=True)])).broken == frozenset()


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_drafts_give_the_bits_of_single_rows(folder, isa, monkeypatch):
    """Right drafts, wrong ones, pages that only drafts need: tokens and logprobs as one by one."""
    executor = load(tiny_gguf(folder, "qwen3"), monkeypatch, isa, threads=2).executor
    ids, params = list(range(30, 45)), {"temperature": 0.9, "frequency_penalty": 1.0, "logprobs": 3}
    expected = executor.execute(
        output([rows(1, 0, 15, samples=True)], [new(1, ids, [0, 1, 2], **params)])
    )
    tokens, logprobs = list(expected.token_ids[1]), list(expected.logprobs[1])
    for count in range(11):
        result = executor.execute(output([rows(1, 15 + count, 1, samples=True)]))
        tokens += result.token_ids[1]
        logprobs += result.logprobs[1]
    drafts = (*tokens[:3], 7, 8)
    first = ScheduledRequest(2, 0, 15, ((),), True, 5, drafts, ((6,),))
    result = executor.execute(output([first], [new(2, ids, [5], **params)]))
    assert (result.token_ids[2], result.logprobs[2]) == (tokens[:4], logprobs[:4])
    again = ScheduledRequest(2, 18, 1, ((),), True, 4, tuple(tokens[4:8]), ((8,),))
    result = executor.execute(output([again]))
    assert (result.token_ids[2], result.logprobs[2]) == (tokens[4:9], logprobs[4:9])
    wrong = ScheduledRequest(2, 23, 1, ((),), True, 2, (tokens[9] + 1, 5), ((),))
    result = executor.execute(output([wrong]))
    assert (result.token_ids[2], result.logprobs[2]) == (tokens[9:10], logprobs[9:10])


def test_pages_of_a_broken_request_can_be_used_again(broken_model, monkeypatch):
    executor = load(broken_model, monkeypatch, ISAS[-1]).executor
    broken = [BROKEN_TOKEN] * 40
    executor.execute(output([rows(1, 0, 40, samples=True)], [greedy(1, broken, [0, 1, 2])]))
    results = []
    for request, blocks in ((2, [2, 0]), (3, [7, 8])):
        ids = list(range(5, 25))
        step = output([rows(request, 0, 20, samples=True)], [greedy(request, ids, blocks)])
        results.append(executor.execute(step))
    assert results[0].logprobs[2] == results[1].logprobs[3]


@pytest.mark.parametrize("isa", ISAS)
def test_prompt_logprobs_are_the_same_in_chunks(folder, isa, monkeypatch):
    executor = load(tiny_gguf(folder, "llama"), monkeypatch, isa, threads=2).executor
    ids = list(range(20, 60))
    request = new(1, ids, [0, 1, 2], prompt_logprobs=3)
    whole = executor.execute(output([rows(1, 0, 40, samples=True)], [request]))
    scores = whole.prompt_logprobs[1]
    assert [score.token_id for score in scores] == ids[1:]
    assert all(len(score.top) == 3 and score.rank >= 1 for score in scores)
    request = new(2, ids, [5, 3, 4], prompt_logprobs=3)
    chunks = [executor.execute(output([rows(2, 0, 17)], [request]))]
    chunks.append(executor.execute(output([rows(2, 17, 1)])))
    chunks.append(executor.execute(output([rows(2, 18, 22, samples=True)])))
    assert [score for chunk in chunks for score in chunk.prompt_logprobs[2]] == scores
    assert chunks[-1].token_ids[2] == whole.token_ids[1]


@pytest.mark.parametrize("isa", ISAS)
def test_a_chunk_that_wants_no_logits(folder, isa, monkeypatch):
    """A prompt in two chunks, the first of which reports nothing, draws what the whole prompt draws."""
    executor = load(tiny_gguf(folder, "llama"), monkeypatch, isa, threads=2).executor
    ids = list(range(20, 60))
    whole = output([rows(1, 0, 40, samples=True)], [greedy(1, ids, [0, 1, 2])])
    expected = executor.execute(whole)
    first = executor.execute(output([rows(2, 0, 30)], [greedy(2, ids, [6, 5, 4])]))
    assert first.token_ids == {}
    last = executor.execute(output([rows(2, 30, 10, samples=True)]))
    assert last.token_ids[2] == expected.token_ids[1]
    assert last.logprobs[2] == expected.logprobs[1]


def test_an_empty_step_draws_nothing(folder, monkeypatch):
    executor = load(tiny_gguf(folder, "llama"), monkeypatch, ISAS[-1]).executor
    assert executor.execute(output([])).token_ids == {}


def test_a_block_that_does_not_exist_is_refused_before_anything_runs(folder, monkeypatch):
    loaded = load(tiny_gguf(folder, "llama"), monkeypatch, ISAS[-1])
    with pytest.raises(ValueError, match="block id"):
        loaded.executor.execute(output([rows(1, 0, 1)], [new(1, [5], [loaded.num_blocks])]))


def test_a_context_longer_than_the_models_is_refused(folder):
    checkpoint = open_checkpoint(tiny_gguf(folder, "llama"))
    scheduler = SchedulerConfig(max_model_len=513)
    with pytest.raises(ConfigError, match="513"):
        load_executor(checkpoint, CacheConfig(), scheduler, ComputeConfig())


@pytest.mark.parametrize("isa", ISAS)
def test_one_token_rows_equal_prefill_rows_through_the_executor(folder, isa, monkeypatch):
    """Greedy decoding, then the same tokens as one prompt: the log-probabilities have the same bits."""
    executor = load(tiny_gguf(folder, "qwen3"), monkeypatch, isa).executor
    ids = [30, 31, 32]
    drawn = []
    first = output([rows(1, 0, 3, samples=True)], [greedy(1, ids, [0, 1])])
    logprobs = []
    for count in range(20):
        step = first if count == 0 else output([rows(1, 2 + count, 1, samples=True)])
        result = executor.execute(step)
        drawn += result.token_ids[1]
        logprobs += [entry.logprob for entry in result.logprobs[1]]
    request = new(2, ids + drawn, [4, 3], prompt_logprobs=1)
    scores = executor.execute(output([rows(2, 0, 22)], [request])).prompt_logprobs[2]
    assert [score.logprob for score in scores[2:]] == logprobs
    assert [score.token_id for score in scores[2:]] == drawn
