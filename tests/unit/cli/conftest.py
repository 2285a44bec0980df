"""Verbs of these tests load a small engine instead of a model."""

from __future__ import annotations

import pytest
from cli_fake_engine import FakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine that the verbs load while this test runs."""
    fake = FakeEngine()
    monkeypatch.setattr("poise.cli.local_engine.load_engine", lambda settings, *tenants: fake)
    return fake
