"""`poise replay`: does the scheduler still decide as it did when a recording was made?"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("replay")
@click.argument("recording", type=click.Path(path_type=Path))
def command(recording: Path) -> None:
    """Repeat a schedule that poise serve --record-schedule RECORDING wrote, and compare every step."""
    from poise.core.recording import replay
    from poise.engine.schedule_file import read_schedule

    num_steps = replay(read_schedule(recording))
    click.echo(f"{num_steps:,} steps, every one as recorded")
