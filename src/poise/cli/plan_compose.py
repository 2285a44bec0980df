"""`poise plan compose`: what several speed-up claims make together."""

from __future__ import annotations

import click

from poise.cli.planning import report_options, show


@click.command("compose")
@click.argument("claims", nargs=-1, required=True, metavar="CLAIM…")
@click.option("--sequential", is_flag=True, help="Each was measured end to end with those before it switched on.")  # fmt: skip
@click.option("--claimed", metavar="TOTAL", help="A total to judge, as 24x.")
@report_options
def command(
    claims: tuple[str, ...], sequential: bool, claimed: str | None, as_json: bool, explain: bool
) -> None:
    """Combine speed-up claims: 4x or 40% (a saving), with the share of the time they touch: 4x@0.6, 40%@0.25."""
    from poise.planner import compose

    show(compose.plan(claims, sequential=sequential, claimed=claimed), as_json, explain)
