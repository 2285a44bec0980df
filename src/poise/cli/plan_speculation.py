"""`poise plan speculation`: when drafting tokens pays, from acceptance and costs, or from two distributions."""

from __future__ import annotations

import click

from poise.cli.planning import report_options, show


@click.command("speculation")
@click.option("--acceptance", metavar="A", help="Probability that a drafted token is accepted, 0 to 1.")  # fmt: skip
@click.option("--k", metavar="N", help="Drafted tokens a step. [default: the best]")
@click.option("--draft-cost", metavar="C", default="0", help="Cost of each drafted token, in plain steps. [default: 0]")  # fmt: skip
@click.option("--verify-cost", metavar="C", default="1", help="Cost of the verifying step, in plain steps. [default: 1]")  # fmt: skip
@click.option("--verify-cost-per-token", metavar="C", default="0", help="What each drafted token adds to it. [default: 0]")  # fmt: skip
@click.option("--p", metavar="P,…", help="The target's probabilities of the next token.")
@click.option("--q", metavar="Q,…", help="The draft's probabilities of the same tokens.")
@report_options
def command(as_json: bool, explain: bool, **given: str | None) -> None:
    """Expected tokens, speed-up, break-even acceptance and best k. A plain step costs 1."""
    from poise.planner import speculation

    show(speculation.plan(**given), as_json, explain)
