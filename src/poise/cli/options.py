"""Command-line options derived from the table in `poise.config`: one place per flag, and it is not here.

Invariant: a verb receives `settings`, already resolved; values that came as text were parsed by the table's own parsers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from poise import config_values
from poise.config import Flag, Settings, flags, resolve

Verb = Callable[..., Any]


def settings_options(*classes: type) -> Callable[[Verb], Verb]:
    """Gives a verb the flags of these config classes, `--config`, and a `settings` argument made of them."""

    def decorate(verb: Verb) -> Verb:
        chosen = flags(classes)

        def run(config: str | None, **arguments: Any) -> Any:
            given = {}
            for name in [option for flag in chosen for option in _names(flag)]:
                value = arguments.pop(_parameter(name))
                given[name] = None if value == () else value
            positional = arguments.pop("model_argument", None)
            if positional is not None:
                if given.get("model") is not None and given["model"] != positional:
                    raise click.UsageError(
                        f"two models: {positional!r} and --model {given['model']!r}; give one"
                    )
                given["model"] = positional
            settings = resolve(given, config_file=Path(config) if config else None)
            show_notes(settings)
            return verb(settings=settings, **arguments)

        run.__doc__ = verb.__doc__
        run.__click_params__ = getattr(verb, "__click_params__", [])  # type: ignore[attr-defined]
        wrapped: Verb = run
        options = [option for flag in chosen for option in _options(flag)]
        options.append(
            click.option(
                "--config", metavar="FILE", help="TOML file with settings under the flags' names."
            )
        )
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return decorate


model_argument = click.argument("model_argument", metavar="[MODEL]", required=False)
"""An optional positional MODEL; `settings_options` joins it with --model."""


def show_notes(settings: Settings) -> None:
    """Warnings of `resolve`, one line each on stderr."""
    for note in settings.notes:
        click.secho(f"poise: note: {note}", fg="yellow", err=True)


def _options(flag: Flag) -> list[Callable[[Verb], Verb]]:
    """The flag's option, then one for each alias."""
    kind = _kind(flag)
    declaration = f"--{flag.name}"
    if flag.parse is config_values.switch:
        declaration += f"/--no-{flag.name}"
    options: list[Callable[[Verb], Verb]] = [
        click.option(declaration, _parameter(flag.name), help=_help(flag), **kind)
    ]
    options += [
        click.option(f"--{alias.name}", _parameter(alias.name), help=alias.help, metavar="VALUE")
        for alias in flag.aliases
    ]
    return options


def _kind(flag: Flag) -> dict[str, Any]:
    """How click takes the value: as given, to be parsed by the table."""
    if flag.parse is config_values.switch:
        return {"default": None}
    if flag.parse is config_values.words:
        return {"multiple": True, "metavar": "VALUE"}
    return {"metavar": "VALUE"}


def _help(flag: Flag) -> str:
    """The flag's help with its default; a default that is worked out says how."""
    if flag.default in (None, ()):
        return f"{flag.help} [default: {flag.why}]"
    shown = flag.default
    if isinstance(shown, bool):
        shown = "on" if shown else "off"
    return f"{flag.help} [default: {shown}]"


def _names(flag: Flag) -> list[str]:
    return [flag.name, *(alias.name for alias in flag.aliases)]


def _parameter(name: str) -> str:
    return "setting_" + name.replace("-", "_")
