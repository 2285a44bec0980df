"""smollm2-135m in the numpy reference, against goldens recorded with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from poise.kernels.reference import ReferenceBackend
from poise.weights.open_checkpoint import open_checkpoint
from reference_forward import build, kv_shape, one_sequence

GOLDENS = Path(__file__).parents[1] / "data" / "goldens.json"
GREEDY = json.loads(GOLDENS.read_text())["smollm2-135m"]["greedy"]
STEPS = 12


@pytest.fixture(scope="module")
def checkpoint(smollm2_path):
    return open_checkpoint(smollm2_path)


def path_logits(backend, forward, golden):
    """Logits along the golden path, all in one step: row i predicts golden id i."""
    prompt = golden["prompt_ids"]
    ids = prompt + golden["ids"][: STEPS - 1]
    return backend.run(one_sequence(ids, wanted=range(len(prompt) - 1, len(ids))), forward)


@pytest.fixture(scope="module")
def plain(checkpoint):
    backend = ReferenceBackend(kv_shape(checkpoint.config, 512), "f32")
    return backend, build(backend, checkpoint)


@pytest.fixture(scope="module")
def exact(checkpoint):
    backend = ReferenceBackend(kv_shape(checkpoint.config, 512))
    return backend, build(backend, checkpoint)


def prompt_of(golden):
    return golden["prompt"][:12]


@pytest.mark.parametrize("golden", GREEDY, ids=prompt_of)
def test_f32_mode_has_the_golden_ids_and_margins(plain, golden):
    logits = path_logits(*plain, golden)
    assert logits.argmax(axis=1).tolist() == golden["ids"][:STEPS]
    best = np.sort(logits, axis=1)[:, -2:]
    assert np.allclose(best[:, 1] - best[:, 0], golden["margins"][:STEPS], atol=2e-3)
    first = logits[0].astype(np.float64)
    logprobs = first - np.log(np.exp(first - first.max()).sum()) - first.max()
    ids, expected = zip(*golden["top10"])
    assert np.allclose(logprobs[list(ids)], expected, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("golden", GREEDY, ids=prompt_of)
def test_exact_mode_leaves_the_path_only_at_small_margins(exact, golden):
    logits = path_logits(*exact, golden)
    assert np.isfinite(logits).all()
    left = np.flatnonzero(logits.argmax(axis=1) != golden["ids"][:STEPS])
    assert not len(left) or golden["margins"][left[0]] <= 0.5


@pytest.mark.slow
def test_decoding_equals_prefill_in_all_bits(exact):
    backend, forward = exact
    together = path_logits(backend, forward, GREEDY[0])
    ids = GREEDY[0]["prompt_ids"] + GREEDY[0]["ids"]
    prompt = len(GREEDY[0]["prompt_ids"])
    backend.pages.view(np.uint8)[...] = 0xFF
    alone = [backend.run(one_sequence(ids[:prompt], wanted=[prompt - 1]), forward)]
    alone += [
        backend.run(one_sequence(ids[i : i + 1], first=i), forward)
        for i in range(prompt, prompt + 4)
    ]
    assert np.array_equal(np.concatenate(alone).view(np.uint32), together[:5].view(np.uint32))
