"""`poise bench compare`: two servers, paired and interleaved, and what may be claimed of their difference."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import click

from poise.bench.contestants import ComparisonStopped, Plan, compare_contestants, contestant
from poise.bench.paired_runs import Comparison, write_comparison
from poise.bench.workloads import preset_schedule
from poise.cli.bench_serve import KEY_VARIABLES
from poise.errors import PoiseError
from poise.weights.pull import resolve_model


@click.command(
    "compare",
    epilog="Exit status 1: a block failed one of its gates, or the comparison could not be finished.",
)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--model", help="Model name to ask for. [default: the server's own]")
@click.option(
    "--workload", default="W3", show_default=True, metavar="W1…W6", help="Load of each block."
)
@click.option("--request-rate", default=1.0, show_default=True, help="W6: requests per second.")
@click.option(
    "--duration", default=30.0, show_default=True, help="W6: seconds of arrivals in a block."
)
@click.option(
    "--pairs", default=10, show_default=True, type=click.IntRange(1), help="Pairs of A and B."
)
@click.option(
    "--null-pairs",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Pairs of A and A, run first.",
)
@click.option(
    "--least-effect",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Smallest difference that matters: 0.02 is 2 %.",
)
@click.option("--confidence", default=0.95, show_default=True, type=click.FloatRange(0.5, 0.999))
@click.option(
    "--seed", type=int, help="Of prompts, arrivals and resampling. [default: drawn, and shown]"
)
@click.option(
    "--threads", type=click.IntRange(1), help="For servers started here. [default: physical cores]"
)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the record goes. [default: poise-compare-TIME.json]",
)
def command(
    a: str,
    b: str,
    model: str | None,
    workload: str,
    request_rate: float,
    duration: float,
    pairs: int,
    null_pairs: int,
    least_effect: float,
    confidence: float,
    seed: int | None,
    threads: int | None,
    output: Path | None,
) -> int:
    """Compare the servers A and B: A against itself first, then A B B A.

    A and B are addresses (http://…), servers that are started for it (`poise bench servers` lists them), or TOML files
    that describe one. Both blocks of a pair get the same prompts and arrivals. A key for servers at addresses is read from
    POISE_BENCH_API_KEY or OPENAI_API_KEY.
    """
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    path = output or Path(time.strftime("poise-compare-%Y%m%d-%H%M%S.json"))
    plan = Plan(
        lambda number: preset_schedule(workload, number, rate=request_rate, seconds=duration),
        num_pairs=pairs,
        num_null_pairs=null_pairs,
        seed=seed,
        confidence=confidence,
        least_effect=least_effect,
    )
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    first, second = (
        contestant(
            text,
            model=model,
            threads=threads,
            api_key=key,
            model_path=lambda name: str(resolve_model(name, offline=True)),
        )
        for text in (a, b)
    )
    click.echo(f"A {first.name}, B {second.name}; workload {workload}, seed {seed}", err=True)
    try:
        comparison = compare_contestants(
            first, second, plan, lambda line: click.echo(line, err=True)
        )
    except ComparisonStopped as stop:
        write_comparison(stop.comparison, path)
        show_log_tail(stop.__cause__)
        raise PoiseError(f"{stop}; the pairs measured so far are in {path}") from None
    except PoiseError as error:
        show_log_tail(error)
        raise
    write_comparison(comparison, path)
    show(comparison)
    click.echo(f"record: {path}")
    return 0 if comparison.valid else 1


def show(comparison: Comparison) -> None:
    """The table, the verdicts and what makes them invalid."""
    click.echo(f"{'metric':<20}{'B ÷ A':>8}  {'interval':<16}{'noise floor':>12}  verdict")
    for result in comparison.results:
        ratio = "–" if result.ratio is None else f"{result.ratio:.3f}"
        span = "–" if result.low is None else f"{result.low:.3f} … {result.high:.3f}"
        floor = "–" if result.noise_floor is None else f"±{result.noise_floor - 1:.1%}"
        click.echo(f"{result.metric:<20}{ratio:>8}  {span:<16}{floor:>12}  {result.verdict}")
    click.echo()
    for result in comparison.results:
        click.echo(result.words)
    for reason in comparison.reasons:
        click.echo(f"INVALID: {reason}")


def show_log_tail(error: BaseException | None) -> None:
    """The last lines of a managed server that failed, above the error itself."""
    for line in getattr(error, "log_tail", "").splitlines():
        click.echo(f"  | {line}", err=True)
