"""`poise serve --explain`: every effective setting with its origin and reason, and what each optimisation rests on.

Loads no model; a value that depends on the model says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from poise.cli.sizes import binary_size
from poise.config import Settings, flags
from poise.machine import available_memory_bytes, default_threads
from poise.optimisations import OPTIMISATIONS, Optimisation

if TYPE_CHECKING:
    from rich.table import Table


def explain(settings: Settings) -> None:
    """Prints both tables to stdout."""
    from rich.console import Console

    console = Console(soft_wrap=False)
    console.print(settings_table(settings))
    console.print(optimisation_table(settings))


def settings_table(settings: Settings) -> Table:
    from rich.table import Table

    table = Table("setting", "value", "from", "why", title="Settings", title_justify="left")
    secrets = {flag.name for flag in flags() if flag.secret}
    for name, value in settings.values().items():
        origin = settings.origins[name]
        shown = _shown(name, value)
        if name in secrets and value:
            shown = "(set)"
        table.add_row(f"--{name}", shown, origin.source, origin.why)
    return table


def optimisation_table(settings: Settings) -> Table:
    from rich.table import Table

    table = Table(
        "optimisation", "now", "class", "way back", "evidence",
        title="Optimisations", title_justify="left",
        caption="exact: the same bytes. law: the same distribution. lossy: a bounded loss of quality.",
        caption_justify="left",
    )  # fmt: skip
    for entry in OPTIMISATIONS:
        table.add_row(
            f"{entry.name}\n({entry.flag})",
            entry.state(settings),
            entry.kind,
            entry.way_back,
            f"{_evidence(entry, settings)}\ngain: {entry.experiment}",
        )
    return table


def _evidence(entry: Optimisation, settings: Settings) -> str:
    """For lossy ones the record of their quality, where there is one for this model and these settings."""
    if entry.kind == "lossy" and entry.state(settings) != "off":
        from poise.verify.quality_record import evidence

        found = evidence(settings)
        if found is not None:
            return f"evidence: {found}"
    return f"no evidence here: run {entry.check}"


def _shown(name: str, value: object) -> str:
    """The value as people read it; None becomes what it will turn into."""
    if name == "kv-cache-memory-bytes":
        available = available_memory_bytes()
        if isinstance(value, int):
            return binary_size(value)
        return "auto" if available is None else f"auto, at most {binary_size(0.4 * available)}"
    if name == "threads" and value is None:
        return f"{default_threads()}"
    if name == "max-body-bytes" and isinstance(value, int):
        return binary_size(value)
    if value is None:
        return "the model's"
    if value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
