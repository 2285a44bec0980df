"""`poise verify isolation`: the checks that tenants learn nothing of each other, as a table or JSON and an exit status."""

from __future__ import annotations

import click

from poise.cli.options import model_argument, settings_options
from poise.cli.verify_checks import PIPED_WIDTH, print_faults
from poise.config import CacheConfig, ComputeConfig, ModelSource, SchedulerConfig, Settings


@click.command("isolation")
@model_argument
@settings_options(ModelSource, CacheConfig, SchedulerConfig, ComputeConfig)
@click.option("--quick", is_flag=True, help="Fewer and shorter requests.")
@click.option("--check", "names", multiple=True, metavar="NAME",
              help="Run this check only; may be given again.")  # fmt: skip
@click.option("--json", "json_wanted", is_flag=True, help="One JSON object instead of the table.")
@click.option("--inject", metavar="FAULT",
              help="Run with a known fault, which must be found. Without MODEL: on a tiny random one.")  # fmt: skip
@click.option("--list-faults", is_flag=True, help="List the faults and end.")
def command(
    settings: Settings,
    quick: bool,
    names: tuple[str, ...],
    json_wanted: bool,
    inject: str | None,
    list_faults: bool,
) -> int:
    """Prove that tenants learn nothing of each other from the prefix cache.

    One tenant's prompts are sent, then another's of the same words: he must get the answers that he gets alone and have
    as many tokens computed as on an empty cache, and his times to first token must not tell what the first one sent. Nor
    may salts, public prefixes, names of blocks or a flood let anything through. Each check also shows that a tenant does
    find what is his. Exit status 1 on any leak, and where a check did not exercise what it is for.
    """
    from rich.console import Console

    from poise.verify.faults import fault_named
    from poise.verify.isolation import isolation_checks_named
    from poise.verify.isolation_faults import ISOLATION_FAULTS
    from poise.verify.proof import prove
    from poise.verify.report import as_json, print_proof

    if list_faults:
        print_faults(ISOLATION_FAULTS)
        return 0
    chosen = isolation_checks_named(names)
    fault = fault_named(inject, ISOLATION_FAULTS) if inject else None
    with Console(stderr=True).status("") as status:
        proof = prove(
            settings,
            quick=quick,
            checks=chosen,
            fault=fault,
            tiny=fault is not None and settings.origins["model"].source == "default",
            shrink=False,
            tell=status.update,
        )
    if json_wanted:
        click.echo(as_json(proof))
    else:
        console = Console()
        print_proof(proof, console if console.is_terminal else Console(width=PIPED_WIDTH))
    return 0 if proof.passed else 1
