"""`poise bench`: the group of measuring verbs. Each lives in its own module, poise.cli.bench_<verb>.

Knows no verb's meaning. Invariant: a verb whose libraries are missing says in one line how to install them.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import click

import poise.cli
from poise.errors import ConfigError

PREFIX = "bench_"
EXTRA = {"aiohttp"}
"""Libraries of the extra `bench`."""


class BenchGroup(click.Group):
    """Finds and loads a verb's module when the verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = [module.name for module in iter_modules(poise.cli.__path__)]
        return sorted(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        try:
            command = import_module(f"poise.cli.{PREFIX}{cmd_name}").command
        except ModuleNotFoundError as error:
            if error.name not in EXTRA:
                raise
            raise ConfigError(
                f"poise bench needs {error.name}: pip install 'poise[bench]'"
            ) from None
        assert isinstance(command, click.Command)
        return command


@click.group("bench", cls=BenchGroup)
def command() -> None:
    """Measure servers that speak the OpenAI API."""
