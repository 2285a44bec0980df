"""`poise env`: the facts a bug report needs, as a table or as JSON."""

from __future__ import annotations

import click

from poise.cli.sizes import binary_size
from poise.machine import environment_report


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(as_json: bool) -> None:
    """Show the facts for a bug report."""
    report = environment_report()
    if as_json:
        import json

        click.echo(json.dumps(report, indent=2))
        return
    for key, value in report.items():
        if isinstance(value, dict):
            for name, detail in value.items():
                click.echo(f"{key + ' ' + name:<28} {detail}")
        elif key.endswith("bytes") and isinstance(value, int):
            click.echo(f"{key:<28} {value} ({binary_size(value)})")
        else:
            click.echo(f"{key:<28} {'no limit' if value is None else value}")
