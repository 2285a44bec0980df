"""A verb with verbs of its own: each lives in a module, found by name and loaded when asked for.

Knows no verb's meaning. Invariant: verb V of group G is poise.cli.G_V:command.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import click

import poise.cli


class ModuleGroup(click.Group):
    """Finds a verb's module when the verb is asked for. `default` is the verb meant where none is named."""

    def __init__(self, name: str, default: str | None = None, **options: Any) -> None:
        super().__init__(name, **options)
        self._prefix = f"{name}_"
        self._default = default

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = [module.name for module in iter_modules(poise.cli.__path__)]
        return sorted(
            name.removeprefix(self._prefix).replace("_", "-")
            for name in names
            if name.startswith(self._prefix)
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"poise.cli.{self._prefix}{cmd_name.replace('-', '_')}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self._default and (not args or args[0] not in self.list_commands(ctx)):
            args = [self._default, *args]
        return super().parse_args(ctx, args)
