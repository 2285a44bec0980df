"""`poise plan little`: requests in flight, arrival rate and time in the system, from numbers or from a record of `poise bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from poise.cli.planning import report_options, show
from poise.errors import ConfigError

if TYPE_CHECKING:
    from poise.bench.record import RunRecord


@click.command("little")
@click.argument("record", required=False, metavar="[RECORD.json]", type=click.Path(path_type=Path))
@click.option("--concurrency", metavar="L", help="Mean requests in flight.")
@click.option("--rate", metavar="RATE", help="Arrivals, in requests a second.")
@click.option("--latency", metavar="SECONDS", help="Mean time in the system.")
@click.option("--output-tokens", metavar="N", help="Mean tokens of an answer: gives tokens a second.")  # fmt: skip
@report_options
def command(
    record: Path | None,
    concurrency: str | None,
    rate: str | None,
    latency: str | None,
    output_tokens: str | None,
    as_json: bool,
    explain: bool,
) -> None:
    """Little's law, L = λ·W: give two for the third, three for a check, or a record of `poise bench serve`."""
    from poise.planner import little

    if record is None:
        report = little.plan(
            concurrency=concurrency, rate=rate, latency=latency, output_tokens=output_tokens
        )
    elif any(value is not None for value in (concurrency, rate, latency, output_tokens)):
        raise ConfigError(f"give {record} or numbers, not both")
    else:
        from poise.bench.record import read_run

        run = read_run(record)
        report = little.plan(**_means(run, record), source=record.name)
        report.notes += _notes(run)
    show(report, as_json, explain)


def _means(run: RunRecord, path: Path) -> dict[str, float]:
    """The three means of a record's full window. Raises ConfigError where one is missing."""
    window = run.summary.get("full")
    times = window.distributions.get("e2el_from_send") if window else None
    found = {
        "concurrency": run.figure("mean_in_flight"),
        "rate": run.figure("request_throughput"),
        "latency": times.mean if times else None,
    }
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise ConfigError(f"{path} has no {' and no '.join(missing)}: nothing was answered")
    return {name: value for name, value in found.items() if value}


def _notes(run: RunRecord) -> list[str]:
    """Where the figures come from, and whether the run itself is to be believed."""
    lines = [
        "From the full window: mean in flight between send and end, answers a second, mean time from the send of those answered. "
        "All come from the same rows, so a difference means requests that failed or crossed the window's edge."
    ]
    if not run.valid:
        reasons = "; ".join(f"{gate.name}: {gate.reason}" for gate in run.failed_gates)
        lines.append(f"The run is not valid ({reasons or run.stopped}).")
    return lines
