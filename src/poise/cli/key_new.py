"""`poise key new TENANT`: a key for a tenant, shown once, and what the tenants file keeps of it."""

from __future__ import annotations

import click

from poise.server.api_keys import new_key
from poise.server.tenants import NAME


@click.command("new", epilog="The file is the one given with poise serve --tenants FILE.")
@click.argument("tenant", required=False)
@click.option(
    "--operator", is_flag=True, help="A key for the metrics of all tenants, in place of TENANT."
)
def command(tenant: str | None, operator: bool) -> None:
    """Make an API key for TENANT: shown this once, kept nowhere.

    The last two lines are TOML for the tenants file, which holds a hash only. Where the table is there already, the key
    goes into its list of keys. Then send SIGHUP to the server.
    """
    if operator == (tenant is not None):
        raise click.UsageError("give a TENANT or --operator")
    if tenant is not None and NAME.fullmatch(tenant) is None:
        raise click.UsageError(
            f"{tenant!r} is not a tenant's name: up to 64 of a-z 0-9 . _ -, a letter or digit first"
        )
    key, entry = new_key()
    click.echo(f"# key, shown once: {key}")
    if tenant is None:
        click.echo("[operator]")
    else:
        click.echo(f'[tenants."{tenant}"]' if "." in tenant else f"[tenants.{tenant}]")
    click.echo(f'keys = ["{entry}"]')
