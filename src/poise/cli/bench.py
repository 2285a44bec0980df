"""`poise bench`: the group of measuring verbs; a verb <verb> lives in poise.cli.bench_<verb>."""

from __future__ import annotations

from poise.cli.module_group import ModuleGroup

command = ModuleGroup("bench", help="Measure servers that speak the OpenAI API.")
