"""gemma3-270m: tokenizer and greedy answers against the recorded goldens, native against the numpy reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from poise.config import CacheConfig, ComputeConfig, SchedulerConfig
from poise.executor.load import load_executor
from poise.kernels.cpu import available_isas
from poise.kernels.ops import KVShape, Step
from poise.kernels.reference import ReferenceBackend
from poise.models.families import family
from poise.models.weights import Source
from poise.tokenizer import Tokenizer
from poise.weights.open_checkpoint import open_checkpoint
from poise.weights.pull import resolve_model

pytestmark = pytest.mark.slow  # the model is 253 MB
GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "goldens.json").read_text())
GOLDENS = GOLDENS["gemma3-270m"]
GREEDY = GOLDENS["greedy"]
SMALL_MARGIN = 0.5  # int8 activations and bf16 attention may turn a choice as close as this
NUM_BLOCKS = 48  # of 16 tokens, of each group
WINDOW = 512
each_prompt = pytest.mark.parametrize("golden", GREEDY, ids=lambda golden: golden["prompt"][:12])


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(resolve_model("gemma3-270m"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer(checkpoint.tokenizer)


def one_sequence(token_ids, first=0, wanted=None, num_groups=1, hidden_blocks=0) -> Step:
    """One sequence in the first blocks of each group's stretch; `hidden_blocks` of all but group 0 are gone."""
    rows = len(token_ids)
    tables = np.arange(num_groups * NUM_BLOCKS, dtype=np.int32).reshape(num_groups, NUM_BLOCKS)
    tables[1:, :hidden_blocks] = -1
    return Step(
        token_ids=np.asarray(token_ids, np.int32),
        positions=np.arange(first, first + rows, dtype=np.int32),
        query_start=np.array([0, rows], np.int32),
        block_tables=tables.reshape(1, -1),
        logit_rows=np.asarray(range(rows) if wanted is None else wanted, np.int32),
    )


class Native:
    """The model on one variant, all pages poisoned."""

    def __init__(self, checkpoint, isa: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("POISE_ISA", isa)
            self.loaded = load_executor(
                checkpoint,
                CacheConfig(memory_bytes=6 * NUM_BLOCKS * 16 * 3 * 1024),
                SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=8192),
                ComputeConfig(threads=2),
            )
        self.backend = self.loaded.executor._backend
        for block in range(self.loaded.num_blocks):
            self.backend.pages.fill(block, 0xFF)

    def __call__(self, token_ids, first=0, wanted=None, hidden_blocks=0):
        step = one_sequence(token_ids, first, wanted, len(self.loaded.kv_groups), hidden_blocks)
        result = np.empty((len(step.logit_rows), self.loaded.vocab_size), np.float32)
        self.backend.run(step, logits=result)
        return result


@pytest.fixture(scope="module", params=[isa for isa in available_isas() if isa != "baseline"])
def native(request, checkpoint):
    return Native(checkpoint, request.param)


def reference(checkpoint, mode):
    """All layers in one group that keeps every page."""
    config = checkpoint.config
    shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, NUM_BLOCKS)
    backend = ReferenceBackend(shape, mode)
    source = Source(backend, checkpoint)
    record = family(config.architecture)
    return lambda step: backend.run(step, lambda ops: record(ops, config, source))


@pytest.fixture(scope="module")
def plain(checkpoint):
    return reference(checkpoint, "f32")


def test_pages_hold_three_layers(native):
    """15 layers with a window and 3 without: six groups, nothing empty."""
    groups = native.loaded.kv_groups
    assert [group.num_layers for group in groups] == [3] * 6
    assert [group.sliding_window for group in groups] == [None] + [WINDOW] * 5
    assert native.loaded.num_blocks == 6 * NUM_BLOCKS


def test_special_ids(tokenizer):
    assert tokenizer.bos_token_id == GOLDENS["bos"]
    assert tokenizer.eos_token_ids[0] == GOLDENS["eos"]
    assert "<end_of_turn>" in [tokenizer.token_text(token) for token in tokenizer.eos_token_ids]


@pytest.mark.parametrize("case", GOLDENS["tokenize"], ids=lambda case: repr(case["text"][:20]))
def test_ids_of_nasty_strings(tokenizer, case):
    assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


@each_prompt
def test_prompt_ids(tokenizer, golden):
    assert tokenizer.encode(golden["prompt"], add_special_tokens=True) == golden["prompt_ids"]


@each_prompt
def test_f32_mode_has_the_golden_ids_and_margins(plain, golden):
    prompt, ids = golden["prompt_ids"], golden["ids"]
    path = prompt + ids[:-1]
    logits = plain(one_sequence(path, wanted=range(len(prompt) - 1, len(path))))
    assert logits.argmax(axis=1).tolist() == ids
    best = np.sort(logits, axis=1)[:, -2:]
    assert np.allclose(best[:, 1] - best[:, 0], golden["margins"], atol=5e-3)
    first = logits[0].astype(np.float64)
    logprobs = first - np.log(np.exp(first - first.max()).sum()) - first.max()
    top_ids, expected = zip(*golden["top10"])
    assert np.allclose(logprobs[list(top_ids)], expected, atol=5e-3)


@each_prompt
def test_greedy_answers_leave_the_goldens_only_at_small_margins(native, golden):
    """Along the golden path, so that what follows a departure is still checked."""
    prompt, ids = golden["prompt_ids"], golden["ids"]
    path = prompt + ids[:-1]
    logits = native(path, wanted=range(len(prompt) - 1, len(path)))
    assert np.isfinite(logits).all()
    left = np.flatnonzero(logits.argmax(axis=1) != ids)
    margins = [golden["margins"][index] for index in left]
    assert all(margin <= SMALL_MARGIN for margin in margins), list(zip(left, margins))


def test_the_first_tokens_equal_the_reference_in_all_bits(native, checkpoint):
    exact = reference(checkpoint, "exact")
    ids = list(GREEDY[0]["prompt_ids"])
    rows, first, wanted = ids, 0, [len(ids) - 1]
    for _ in range(2):
        actual = native(rows, first, wanted)
        expected = exact(one_sequence(rows, first, wanted))
        assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32)), first
        rows, first, wanted = [int(actual[0].argmax())], first + len(rows), [0]


def test_past_the_window_pages_may_go(native):
    """600 tokens, then decoding without the pages behind the window, equals all in chunks with every page."""
    random = np.random.default_rng(1)
    ids = random.integers(1000, 200_000, 620).tolist()
    rows = {}
    for first in range(0, 620, 124):
        logits = native(ids[first : first + 124], first, wanted=range(124))
        rows |= {first + i: logits[i].copy() for i in range(124)}
    for position in (600, 610, 619):
        gone = (position - WINDOW + 1) // 16
        actual = native([ids[position]], position, hidden_blocks=gone)
        assert np.array_equal(actual[0].view(np.uint32), rows[position].view(np.uint32))
