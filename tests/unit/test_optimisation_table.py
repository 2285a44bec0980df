"""The table of optimisations: names that exist, checks that exist, nothing inexact on by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from poise.config import NOT_FLAGS, flag_names, resolve
from poise.optimisations import OPTIMISATIONS, Optimisation
from poise.verify.checks import checks_named

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("entry", OPTIMISATIONS, ids=lambda entry: entry.name)
class TestEntry:
    def test_its_flag_exists(self, entry: Optimisation) -> None:
        if entry.flag.startswith("--"):
            assert entry.flag.removeprefix("--") in flag_names()
        else:
            assert entry.flag in NOT_FLAGS or entry.kind == "lossy"

    def test_its_check_exists(self, entry: Optimisation) -> None:
        tool, first, *rest = entry.check.split()
        if tool == "pytest":
            assert (ROOT / first).exists()
        elif rest[0] == "--check":
            assert (tool, first) == ("poise", "verify")
            assert checks_named(rest[1:])
        else:
            assert entry.check.split(" --")[0] == "poise verify quality"
            flags = [word.removeprefix("--") for word in rest if word.startswith("--")]
            assert set(flags) <= set(flag_names())

    def test_the_way_back_switches_it_off(self, entry: Optimisation) -> None:
        if entry.off:
            settings = resolve({**entry.off, "max-model-len": "8192"}, {})
            assert entry.state(settings) == "off"

    def test_only_exact_ones_are_on_by_default(self, entry: Optimisation) -> None:
        if entry.kind != "exact" and entry.name != "quantised activations":
            assert entry.state(resolve({}, {})) == "off"
