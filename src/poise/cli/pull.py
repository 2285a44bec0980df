"""`poise pull`: fetches a named model into the cache and says where it lies."""

from __future__ import annotations

import click


@click.command("pull")
@click.argument("name")
def command(name: str) -> None:
    """Fetch the model NAME into the cache (see `poise models`)."""
    from rich.console import Console

    from poise.weights.pull import pull

    click.echo(pull(name, console=Console(stderr=True)))
