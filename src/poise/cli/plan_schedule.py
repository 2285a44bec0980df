"""`poise plan schedule`: static against continuous batching for answers of given lengths, with a Gantt picture."""

from __future__ import annotations

from pathlib import Path

import click

from poise.cli.planning import report_options, show, svg_option


@click.command("schedule")
@click.option("--lengths", required=True, metavar="N,…", help="Tokens of each answer, in order of arrival.")  # fmt: skip
@click.option("--slots", required=True, metavar="N", help="Requests that may run at the same time.")
@svg_option
@report_options
def command(lengths: str, slots: str, svg: Path | None, as_json: bool, explain: bool) -> None:
    """Iterations that static and continuous batching take. Every iteration is one unit; no prefill."""
    from poise.planner import gantt, schedule

    both = schedule.timelines(lengths, slots)
    report = schedule.plan(*both)
    report.picture = gantt.terminal(both)
    if svg is not None:
        from poise.planner.svg import write

        write(svg, gantt.picture(both))
    show(report, as_json, explain)
