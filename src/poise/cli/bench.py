"""`poise bench`: the group of measuring verbs.

Knows no verb's meaning. Invariant: a verb <verb> lives in its own module, poise.cli.bench_<verb>, and is found by that name.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import click

import poise.cli

PREFIX = "bench_"


class BenchGroup(click.Group):
    """Finds and loads a verb's module when the verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = [module.name for module in iter_modules(poise.cli.__path__)]
        return sorted(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(f"poise.cli.{PREFIX}{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group("bench", cls=BenchGroup)
def command() -> None:
    """Measure servers that speak the OpenAI API."""
