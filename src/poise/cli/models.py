"""`poise models`: the named models, and which of them are in the cache."""

from __future__ import annotations

import click

from poise.cli.sizes import binary_size


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="A JSON list.")
def command(as_json: bool) -> None:
    """List the models that go by a name."""
    from poise.weights.pull import list_models

    models = list_models()
    if as_json:
        import json

        records = [
            {
                "name": model.name,
                "cached": model.cached,
                "bytes": model.num_bytes,
                "sha256": model.sha256,
                "licence": model.licence,
                "description": model.description,
                "path": str(model.path),
            }
            for model in models
        ]
        click.echo(json.dumps(records, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "cached", "size", "licence", "description")
    for model in models:
        table.add_row(
            model.name,
            "yes" if model.cached else "no",
            binary_size(model.num_bytes),
            model.licence,
            model.description,
        )
    Console().print(table)
