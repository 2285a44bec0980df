"""`poise verify quality`: the quality that the serving arithmetic costs, as a table, a record and an exit status."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from poise.cli.options import model_argument, settings_options
from poise.config import CacheConfig, ComputeConfig, ModelSource, Settings
from poise.machine import default_threads
from poise.verify.quality_record import JUDGED, NUM_WINDOWS, encode, own_folder, save

if TYPE_CHECKING:
    from poise.verify.quality_record import Figure, QualityRecord

TEXT_NAMES = ("prose", "code", "dialogue")


@click.command("quality")
@model_argument
@settings_options(ModelSource, CacheConfig, ComputeConfig)
@click.option("--text", "names", multiple=True, type=click.Choice(TEXT_NAMES),
              help="Measure on this text only; may be given again. [default: all]")  # fmt: skip
@click.option("--windows", type=click.IntRange(1), default=NUM_WINDOWS, show_default=True,
              help="Windows of 512 tokens per text, of which the second half is scored.")  # fmt: skip
@click.option("--max-kl", type=click.FloatRange(min=0, min_open=True),
              help="Largest mean KL divergence on prose and code. [default: the named model's target]")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path),
              help="Also write the record (JSON) here.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of the table.")
def command(
    settings: Settings,
    names: tuple[str, ...],
    windows: int,
    max_kl: float | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Compare what MODEL answers with here with its plain float32 arithmetic.

    Perplexity, KL divergence and agreement on the likeliest token, on texts that every Python ships. The reference holds
    the weights in float32: four bytes each. The record is kept for `poise serve --explain`. Exit status 1 if a target is
    missed.
    """
    if max_kl is not None and names and not set(names) & set(JUDGED):
        raise click.UsageError(f"--max-kl judges {' and '.join(JUDGED)} only; give one as --text")
    # Read when numpy is first imported: more threads than cores make its small products ten times slower.
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", str(settings.compute.threads or default_threads())
    )
    from poise.engine.build import open_source
    from poise.verify.quality import measure_quality
    from poise.verify.quality_texts import read_text

    record = measure_quality(
        open_source(settings.source),
        settings.cache,
        settings.compute,
        [read_text(name) for name in TEXT_NAMES if not names or name in names],
        num_windows=windows,
        max_kl=max_kl,
        progress=_progress,
    )
    kept = own_folder() / record.file_name if record.is_evidence else None
    for path in (kept, out):
        if path is not None:
            save(record, path)
    if as_json:
        click.echo(encode(record))
    else:
        _print_table(record)
        click.echo(f"record: {kept or 'not kept, for a part of the texts is no evidence'}")
    return 1 if record.failures else 0


def _progress(text: str, done: int, total: int) -> None:
    """One line that writes over itself on a terminal; silent where stderr is piped."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        click.echo(f"\r{text}: {done} of {total} windows", err=True, nl=False)
        click.echo(end, err=True, nl=False)


def _print_table(record: QualityRecord) -> None:
    from rich.console import Console
    from rich.table import Table

    target = "" if record.kl_target is None else f", target {record.kl_target:g}"
    table = Table(
        "text", "tokens", f"mean KL{target}", "p99 KL", "perplexity", "reference", "change", "same top-1",
        title=f"{record.model} ({record.format}): {record.activations} activations, "
        f"{record.kv_cache_dtype} KV, against float32",
        title_justify="left",
        caption="± is one standard error; the last two columns tell gross failure only",
        caption_justify="left",
    )  # fmt: skip
    for text in record.texts:
        table.add_row(
            text.name if text.judged else f"{text.name} (reported)",
            f"{text.num_tokens:,}",
            _plus_minus(text.kl, ".5f"),
            f"{text.kl_p99:.4f}",
            _plus_minus(text.perplexity, ".3f"),
            f"{text.reference_perplexity.value:.3f}",
            _plus_minus(text.perplexity_change, ".2%"),
            _plus_minus(text.top1_agreement, ".2%"),
        )
    Console().print(table)
    for failure in record.failures:
        click.secho(f"missed: {failure}", fg="red")
    if not record.failures:
        click.echo("no target missed")


def _plus_minus(figure: Figure, form: str) -> str:
    return f"{figure.value:{form}} ± {figure.error:{form}}"
