"""`poise verify faults`: every known fault against every check."""

from __future__ import annotations

from pathlib import Path

import click

from poise.cli.options import settings_options
from poise.config import CacheConfig, ComputeConfig, SchedulerConfig, Settings


@click.command("faults")
@settings_options(CacheConfig, SchedulerConfig, ComputeConfig)
@click.option("--write", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PAGE",
              help="Put the table between the marks of this page (docs/EXACTNESS.md).")  # fmt: skip
def command(settings: Settings, write: Path | None) -> int:
    """Inject each known fault in turn and print which checks find it: fault x check.

    Runs on a tiny random model. Exit status 1 if a fault escapes the check named for it, or a check crashes.
    """
    from rich.console import Console

    from poise.verify.matrix import escaped, markdown, replace_matrix, run_matrix

    with Console(stderr=True).status("") as status:
        proofs = run_matrix(settings, status.update)
    table = markdown(proofs)
    click.echo(table)
    if write is not None:
        page = write.read_text(encoding="utf-8")
        write.write_text(replace_matrix(page, table), encoding="utf-8")
    problems = escaped(proofs)
    for problem in problems:
        click.secho(problem, fg="red", err=True)
    return 1 if problems else 0
