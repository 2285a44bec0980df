"""`poise bench servers`: the servers that a measurement can start by itself, what they need, and getting it."""

from __future__ import annotations

import click


@click.command("servers")
@click.argument("name", required=False, metavar="[NAME|FILE.toml]")
@click.option("--plan", is_flag=True, help="Show what would be installed, and do nothing.")
@click.option("--prepare", is_flag=True, help="Install it into an environment of its own.")
def command(name: str | None, plan: bool, prepare: bool) -> None:
    """List the servers known by name; plan or prepare one of them.

    Nothing is installed or downloaded without --prepare, and then only under POISE_HOME/peers/NAME, which may be removed.
    """
    from poise.bench import presets

    if plan and prepare:
        raise click.UsageError("--plan shows and --prepare does: give one")
    if name is None:
        if plan or prepare:
            raise click.UsageError("name the server to plan or prepare")
        for known in presets.preset_names():
            spec = presets.find_spec(known)
            state = "ready" if presets.is_prepared(spec) else "needs --prepare"
            click.echo(f"{known:<12} {state:<16} {spec.description}")
        return
    spec = presets.find_spec(name)
    if prepare:
        presets.prepare(spec)
        click.echo(f"{spec.name} is prepared in {presets.peer_folder(spec)}")
        return
    for line in presets.plan(spec):
        click.echo(line)
