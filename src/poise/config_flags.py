"""How a field of a configuration is written by users: its flag, its parser, its help and the reason for its default.

Knows no setting. Invariant: a value that a flag's parser refuses never stands in a config.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

from poise.config_values import Parser
from poise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Alias:
    """Another flag that sets the same field, its value translated; `note` tells the user what it did."""

    name: str
    parse: Parser
    help: str
    note: str


@dataclass(frozen=True, slots=True)
class Flag:
    """How users name a field and write its value. `why` gives the reason for the default in `--explain`."""

    name: str  # without dashes in front: "max-num-seqs"
    default: Any
    parse: Parser
    help: str
    why: str
    aliases: tuple[Alias, ...] = ()
    secret: bool = False  # never shown


def setting(
    default: Any,
    name: str,
    parse: Parser,
    help: str,  # noqa: A002 - the word typer uses for the same thing
    why: str,
    *aliases: Alias,
    secret: bool = False,
) -> Any:
    """A dataclass field with its flag."""
    return field(
        default=default, metadata={"flag": Flag(name, default, parse, help, why, aliases, secret)}
    )


def flag_of(item: Field[Any]) -> Flag:
    """The flag that a field's metadata holds."""
    flag = item.metadata["flag"]
    assert isinstance(flag, Flag)
    return flag


def check(config: Any) -> None:
    """Raises ConfigError for a field that its own flag would refuse; the default of a field is always fine."""
    for item in fields(config):
        value = getattr(config, item.name)
        if value == flag_of(item).default:
            continue
        try:
            parsed = flag_of(item).parse(value)
        except ValueError as error:
            raise ConfigError(f"{item.name}={value!r} is not valid: {error}") from None
        if type(parsed) is not type(value):
            raise ConfigError(f"{item.name}={value!r} is not valid: expected {parsed!r}")
