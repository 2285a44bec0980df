"""`poise plan speculation`: when drafting tokens pays, from acceptance and costs, or from two distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from poise.cli.planning import offline_option, report_options, show

if TYPE_CHECKING:
    from poise.core.step_time import StepTimeModel


@click.command("speculation")
@click.option("--acceptance", metavar="A", help="Probability that a drafted token is accepted, 0 to 1.")  # fmt: skip
@click.option("--k", metavar="N", help="Drafted tokens a step. [default: the best]")
@click.option("--draft-cost", metavar="C", default="0", help="Cost of each drafted token, in plain steps. [default: 0]")  # fmt: skip
@click.option("--verify-cost", metavar="C", default="1", help="Cost of the verifying step, in plain steps. [default: 1]")  # fmt: skip
@click.option("--verify-cost-per-token", metavar="C", default="0", help="What each drafted token adds to it. [default: 0]")  # fmt: skip
@click.option("--p", metavar="P,…", help="The target's probabilities of the next token.")
@click.option("--q", metavar="Q,…", help="The draft's probabilities of the same tokens.")
@click.option("--model", metavar="MODEL", help="Take the cost of verifying from the steps that serving this model took here.")  # fmt: skip
@click.option("--batch", metavar="N", default="1", help="With --model: requests in a step. [default: 1]")  # fmt: skip
@click.option("--context", metavar="TOKENS", default="256", help="With --model: tokens of each. [default: 256]")  # fmt: skip
@offline_option
@report_options
def command(
    model: str | None, offline: bool, as_json: bool, explain: bool, **given: str | None
) -> None:
    """Expected tokens, speed-up, break-even acceptance and best k. A plain step costs 1."""
    from poise.planner import speculation

    step_times = None if model is None else measured(model, offline)
    show(speculation.plan(step_times=step_times, **given), as_json, explain)


def measured(model: str, offline: bool) -> StepTimeModel:
    """As serving with default settings left them. Raises ConfigError where it has left nothing."""
    from rich.console import Console

    from poise.engine.step_times import served_model
    from poise.errors import ConfigError
    from poise.weights.open_checkpoint import open_checkpoint
    from poise.weights.pull import resolve_model

    path = resolve_model(model, offline=offline, console=Console(stderr=True))
    step_times = served_model(open_checkpoint(path))
    if step_times is None:
        raise ConfigError(
            f"--model is {model!r}: this machine has no step times of it; serve it for a while with "
            "`poise serve` and its default settings"
        )
    return step_times
