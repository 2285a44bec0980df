"""The f32 mode computes what transformers computes, for each architecture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from poise.kernels.reference import ReferenceBackend
from poise.weights.open_checkpoint import open_checkpoint
from reference_forward import build, kv_shape, one_sequence

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def test_f32_mode_equals_transformers(name):
    checkpoint = open_checkpoint(DATA / name)
    golden = np.load(DATA / name / "golden.npz")
    for sequence in range(4):
        ids, wanted = golden[f"tokens_{sequence}"], golden[f"rows_{sequence}"]
        expected = golden[f"logits_{sequence}"]
        backend = ReferenceBackend(kv_shape(checkpoint.config, 512), "f32")
        step = one_sequence(ids, wanted=wanted)
        actual = backend.run(step, build(backend, checkpoint))
        assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def test_exact_mode_stays_near_transformers(name):
    """F32 weights: only attention rounds (to bf16)."""
    checkpoint = open_checkpoint(DATA / name)
    golden = np.load(DATA / name / "golden.npz")
    backend = ReferenceBackend(kv_shape(checkpoint.config, 512))
    step = one_sequence(golden["tokens_3"], wanted=golden["rows_3"])
    actual = backend.run(step, build(backend, checkpoint))
    expected = golden["logits_3"]
    assert np.abs(actual - expected).max() <= 0.02 * np.abs(expected).max()
