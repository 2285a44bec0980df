"""Tiny float32 models against logits recorded with transformers: tests/data/tiny_*."""

from __future__ import annotations

import numpy as np
import pytest
from native_models import DATA, Part, Reference, load, native_logits

from poise.kernels.cpu import available_isas

NAMES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_gemma3"]
ROUNDING = (
    1.5e-2  # of the largest logit: q, K, V and probabilities in bf16 (measured: up to 0.83 %)
)


def goldens(name):
    """(token ids, rows, logits of these rows) of the four sequences of a model."""
    stored = np.load(DATA / name / "golden.npz")
    return [[stored[f"{kind}_{i}"] for kind in ("tokens", "rows", "logits")] for i in range(4)]


@pytest.mark.parametrize("name", NAMES)
def test_the_float_reference_equals_transformers(name):
    reference = Reference(DATA / name, "f32")
    for ids, rows, expected in goldens(name):
        actual = reference.logits([Part(ids, 0, np.arange(32))])[rows]
        assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", NAMES)
def test_native_differs_by_the_rounding_of_attention_alone(name, isa, monkeypatch):
    """Matrices are f32; attention works in bf16. Where the best token leads by more than that, it stays the best."""
    loaded = load(DATA / name, monkeypatch, isa, threads=2)
    for ids, rows, expected in goldens(name):
        actual = native_logits(loaded, [Part(ids, 0, np.arange(32))])[rows]
        allowed = ROUNDING * np.abs(expected).max()
        assert np.abs(actual - expected).max() <= allowed
        best = np.sort(expected, axis=1)
        clear = best[:, -1] - best[:, -2] > 2 * allowed
        assert (actual.argmax(axis=1) == expected.argmax(axis=1))[clear].all()


@pytest.mark.parametrize("name", NAMES)
def test_native_equals_the_exact_reference(name, monkeypatch):
    loaded = load(DATA / name, monkeypatch, available_isas()[-1], threads=2)
    reference = Reference(DATA / name, "exact")
    for ids, _, _ in goldens(name)[:3]:
        part = Part(ids, 0, np.arange(32))
        expected = reference.logits([part])
        actual = native_logits(loaded, [part])
        assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))
