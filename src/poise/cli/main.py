"""The entry point `poise`: finds the verb, runs it, and turns every error into one line and an exit status.

Knows no verb's meaning. Invariant: exit status 0 success, 1 failure, 2 wrong usage or configuration, 130 interrupted; a
PoiseError never shows a traceback, any other exception always does.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from poise import __version__
from poise.errors import ConfigError, InvalidRequestError, PoiseError

VERBS = (
    *("serve", "generate", "chat", "pull", "models", "inspect", "env", "bench", "plan", "profile"),
    *("verify", "replay", "key", "why"),
)


class VerbGroup(click.Group):
    """Loads a verb's module when the verb is asked for: poise.cli.<verb>:command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = import_module(f"poise.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="poise", message="%(prog)s %(version)s")
def group() -> None:
    """poise, LLM serving: the same answer at any load, byte for byte.

    Begin with `poise serve` or `poise chat`; both fetch a small model on first use.
    """


def main() -> None:
    """Runs the command line and leaves with its exit status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command line; returns its exit status."""
    if sys.platform == "win32":
        return _fail("Windows is not supported; use Linux or macOS, or WSL on Windows", 1)
    try:
        status = group.main(arguments, prog_name="poise", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return 2
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (ConfigError, InvalidRequestError) as error:
        return _fail(str(error), 2)
    except PoiseError as error:
        return _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `poise models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    line = " ".join(message.split())
    click.secho(f"poise: {line}", fg="red", err=True, color=False if _no_color() else None)
    return status


def _no_color() -> bool:
    return bool(os.environ.get("NO_COLOR"))
