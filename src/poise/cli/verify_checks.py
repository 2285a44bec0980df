"""`poise verify MODEL`: the checks of exactness, as a table or JSON and an exit status."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from poise.cli.options import model_argument, settings_options
from poise.config import CacheConfig, ComputeConfig, ModelSource, SchedulerConfig, Settings

if TYPE_CHECKING:
    from poise.verify.faults import Fault

PIPED_WIDTH = 140


@click.command(
    "checks",
    epilog="Other verbs: quality (what the arithmetic costs), isolation (of tenants), faults (all faults, as a matrix).",
)
@model_argument
@settings_options(ModelSource, CacheConfig, SchedulerConfig, ComputeConfig)
@click.option(
    "--quick", is_flag=True, help="Fewer and shorter requests: a minute or less on a small model."
)
@click.option(
    "--check",
    "names",
    multiple=True,
    metavar="NAME",
    help="Run this check only; may be given again.",
)
@click.option("--json", "json_wanted", is_flag=True, help="One JSON object instead of the table.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write the answers here, for --against.",
)
@click.option(
    "--against",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also ask the requests of a record again: after a restart, an upgrade, on another machine.",
)
@click.option(
    "--inject",
    metavar="FAULT",
    help="Run with a known fault, which must be found. Without MODEL: on a tiny random one.",
)
@click.option("--list-faults", is_flag=True, help="List the faults and end.")
def command(
    settings: Settings,
    quick: bool,
    names: tuple[str, ...],
    json_wanted: bool,
    record: Path | None,
    against: Path | None,
    inject: str | None,
    list_faults: bool,
) -> int:
    """Prove on MODEL that nothing changes an answer that should not.

    A set of requests is answered one by one, then in company, in other orders, in pieces, after preemption, with other
    block sizes, threads, caches and instruction sets: token ids, bits of logprobs, text and finish reasons must be the
    same. The model's own settings (--threads, --block-size, …) are what everything is held against. Exit status 1 on any
    difference, and where a check did not exercise what it is for.
    """
    from rich.console import Console

    from poise.verify import record as records
    from poise.verify.checks import checks_named
    from poise.verify.faults import FAULTS, fault_named
    from poise.verify.proof import prove
    from poise.verify.report import as_json, print_proof

    if list_faults:
        print_faults(FAULTS)
        return 0
    recorded = records.read(against) if against else None
    chosen = checks_named(names)
    fault = fault_named(inject) if inject else None
    with Console(stderr=True).status("") as status:
        proof = prove(
            settings,
            quick=quick,
            checks=chosen,
            fault=fault,
            tiny=fault is not None and settings.origins["model"].source == "default",
            against=recorded,
            record=record,
            tell=status.update,
        )
    if json_wanted:
        click.echo(as_json(proof))
    else:
        console = Console()
        print_proof(proof, console if console.is_terminal else Console(width=PIPED_WIDTH))
    return 0 if proof.passed else 1


def print_faults(faults: Sequence[Fault]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "what it does", "caught by", "acts in")
    for fault in faults:
        where = "numpy reference" if fault.in_reference else "engine, native kernels"
        table.add_row(fault.name, fault.what, fault.check, where)
    Console().print(table)
