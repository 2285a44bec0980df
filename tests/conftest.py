"""Fixtures that more than one folder of tests needs; puts tests/ on the import path for `tiny_models`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of smollm2-135m, pulled if it is not in the cache."""
    from poise.weights.pull import resolve_model

    return resolve_model("smollm2-135m")
