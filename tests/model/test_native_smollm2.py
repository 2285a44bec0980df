"""smollm2-135m on the native backend: the recorded greedy answers, and the numpy reference in all bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from poise.config import CacheConfig, ComputeConfig, SchedulerConfig
from poise.executor.load import load_executor
from poise.kernels.cpu import available_isas
from poise.kernels.reference import ReferenceBackend
from poise.weights.open_checkpoint import open_checkpoint
from reference_forward import build, kv_shape, one_sequence

ISAS = available_isas()
GOLDENS = Path(__file__).parents[1] / "data" / "goldens.json"
GREEDY = json.loads(GOLDENS.read_text())["smollm2-135m"]["greedy"]
SMALL_MARGIN = 0.5  # int8 activations and bf16 attention may turn a choice as close as this
NUM_BLOCKS = 32


@pytest.fixture(scope="module")
def checkpoint(smollm2_path):
    return open_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def native(request, checkpoint):
    """Logits of steps on one variant; all pages poisoned first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POISE_ISA", request.param)
        loaded = load_executor(
            checkpoint,
            CacheConfig(memory_bytes=NUM_BLOCKS * 16 * 23_040),
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128),
            ComputeConfig(threads=2),
        )
    backend = loaded.executor._backend
    for block in range(NUM_BLOCKS):
        backend.pages.fill(block, 0xFF)

    def logits(step):
        result = np.empty((len(step.logit_rows), loaded.vocab_size), np.float32)
        backend.run(step, logits=result)
        return result

    return logits


@pytest.fixture(scope="module")
def reference(checkpoint):
    backend = ReferenceBackend(kv_shape(checkpoint.config, NUM_BLOCKS * 16))
    forward = build(backend, checkpoint)
    return lambda step: backend.run(step, forward)


def each(goldens):
    """Every variant with every golden; the portable one takes seconds each, all but the first belong to the full tier."""
    cases = [
        pytest.param(
            isa,
            golden,
            id=f"{isa}-{golden['prompt'][:12]}",
            marks=[pytest.mark.slow] if isa == "baseline" and golden is not GREEDY[0] else [],
        )
        for isa in ISAS
        for golden in goldens
    ]
    return pytest.mark.parametrize(("native", "golden"), cases, indirect=["native"])


@each(GREEDY)
def test_greedy_answers_leave_the_goldens_only_at_small_margins(native, golden):
    """Along the golden path, so that what follows a departure is still checked."""
    prompt, ids = golden["prompt_ids"], golden["ids"]
    path = prompt + ids[:-1]
    logits = native(one_sequence(path, wanted=range(len(prompt) - 1, len(path))))
    assert np.isfinite(logits).all()
    left = np.flatnonzero(logits.argmax(axis=1) != ids)
    margins = [golden["margins"][index] for index in left]
    assert all(margin <= SMALL_MARGIN for margin in margins), list(zip(left, margins))


@each(GREEDY)
def test_decoding_equals_prefill_in_all_bits(native, golden):
    """The native backend's own greedy answer, token by token, then as one prompt and in two chunks."""
    prompt = golden["prompt_ids"]
    step = one_sequence(prompt, wanted=[len(prompt) - 1])
    rows, ids = [native(step)[0]], list(prompt)
    for _ in range(15):
        ids.append(int(rows[-1].argmax()))
        rows.append(native(one_sequence(ids[-1:], first=len(ids) - 1))[0])
    decoded = np.array(rows).view(np.uint32)
    first = len(prompt) - 1
    assert np.array_equal(native(one_sequence(ids))[first:].view(np.uint32), decoded)
    native(one_sequence(ids[:first]))
    chunk = native(one_sequence(ids[first:], first=first))
    assert np.array_equal(chunk.view(np.uint32), decoded)


def same_answer(native, reference, golden, count):
    """Greedy decoding on both backends; every logit of every step in all bits."""
    ids = list(golden["prompt_ids"])
    step = one_sequence(ids, wanted=[len(ids) - 1])
    for _ in range(count):
        actual, expected = native(step), reference(step)
        assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32)), len(ids)
        ids.append(int(actual[0].argmax()))
        step = one_sequence(ids[-1:], first=len(ids) - 1)


@each(GREEDY[:1])
def test_the_first_tokens_equal_the_reference_in_all_bits(native, reference, golden):
    same_answer(native, reference, golden, 3)


@pytest.mark.slow
@each(GREEDY[1:3])
def test_an_answer_equals_the_reference_in_all_bits(native, reference, golden):
    same_answer(native, reference, golden, 32)
