"""What the verbs of `poise plan` have in common: how an answer is printed, and which model is meant.

Knows where models come from, no arithmetic. Invariant: a model is opened for its shape and size at most, never loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from poise.errors import ConfigError

if TYPE_CHECKING:
    from poise.planner.model import PlannedModel
    from poise.planner.report import Report

Verb = Callable[..., Any]


def report_options(verb: Verb) -> Verb:
    """Gives a verb --json and --explain."""
    verb = click.option("--explain", is_flag=True, help="Show the equation under each figure.")(
        verb
    )
    return click.option("--json", "as_json", is_flag=True, help="One JSON object.")(verb)


svg_option = click.option(
    "--svg", metavar="FILE", type=click.Path(path_type=Path), help="Draw it as SVG, too."
)
offline_option = click.option(
    "--offline", is_flag=True, help="Never touch the network: a named model must be in the cache."
)


def show(report: Report, as_json: bool, explain: bool) -> None:
    """Prints the answer to stdout."""
    if as_json:
        import json

        click.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        click.echo("\n".join(report.as_text(explain)))


def planned_model(text: str, offline: bool) -> PlannedModel:
    """A well-known shape, a config.json, or whatever else `poise serve` takes, with its weights as stored.

    Raises PullError, ModelFileError or ConfigError.
    """
    from poise.planner.model import SHAPES, PlannedModel
    from poise.weights.dummy_shapes import SHAPES as CONFIGS

    if text in SHAPES:
        config, experts = SHAPES[text]
        return PlannedModel.of_shape(text, config, experts)
    if text in CONFIGS:
        return _of_config(text, Path(text), CONFIGS[text])
    path = Path(text).expanduser()
    if path.name.endswith(".json") and path.is_file():
        from poise.weights.json_file import read_json

        return _of_config(str(path), path, read_json(path))
    return _of_checkpoint(text, offline)


def shape_names() -> list[str]:
    """Models that need no file."""
    from poise.planner.model import SHAPES
    from poise.weights.dummy_shapes import SHAPES as CONFIGS

    return sorted({*SHAPES, *CONFIGS})


def _of_config(name: str, path: Path, values: dict[str, object]) -> PlannedModel:
    from poise.planner.model import PlannedModel
    from poise.weights.hugging_face_config import JSONFields, model_config

    return PlannedModel.of_shape(name, model_config(JSONFields(path, values), qkv_bias=False))


def _of_checkpoint(text: str, offline: bool) -> PlannedModel:
    from rich.console import Console

    from poise.planner.model import PlannedModel
    from poise.weights.open_checkpoint import open_checkpoint
    from poise.weights.pull import resolve_model

    try:
        path = resolve_model(text, offline=offline, console=Console(stderr=True))
    except ConfigError as error:
        raise ConfigError(f"{error}; known shapes: {', '.join(shape_names())}") from None
    checkpoint = open_checkpoint(path)
    return PlannedModel(
        name=text if not Path(text).exists() else checkpoint.name,
        config=checkpoint.config,
        weight_bytes=checkpoint.weight_bytes(),
        weights_from=f"as stored, {checkpoint.format}",
    )
