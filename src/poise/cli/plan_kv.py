"""`poise plan kv`: KV memory per token, sequence and batch, in the engine's own blocks, and what fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from poise.cli.planning import offline_option, planned_model, report_options, show
from poise.errors import ConfigError

if TYPE_CHECKING:
    from poise.planner.memory import KVLayers


@click.command("kv")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--layers", metavar="N", help="Layers, all kinds together.")
@click.option("--kv-heads", metavar="N", help="KV heads (not query heads) of a layer.")
@click.option("--head-dim", metavar="N", help="Width of a head.")
@click.option("--sliding-layers", metavar="N", help="Of the layers, those with a sliding window.")
@click.option("--window", metavar="TOKENS", help="Tokens that a sliding layer sees.")
@click.option("--shared-layers", metavar="N", help="Of the layers, those that use another's KV.")
@click.option("--kv-dtype", metavar="TYPE", default="bf16", help="f32, bf16, f16, fp8, int8 or int4. [default: bf16]")  # fmt: skip
@click.option("--tokens", metavar="N", help="Tokens of each sequence. [default: the model's context, or 2048]")  # fmt: skip
@click.option("--sequences", metavar="N", default="1", help="Sequences at the same time. [default: 1]")  # fmt: skip
@click.option("--shared-prefix", metavar="TOKENS", default="0", help="Tokens that all of them begin with. [default: 0]")  # fmt: skip
@click.option("--block-size", metavar="TOKENS", default="16", help="Tokens of a block. [default: 16]")  # fmt: skip
@click.option("--weights", metavar="SIZE", help="Bytes of weights, as 14GB. [default: the model's own]")  # fmt: skip
@click.option("--workspace", metavar="SIZE", help="Bytes of workspace. [default: poise's own for the model]")  # fmt: skip
@click.option(
    "--memory", metavar="SIZE", help="Memory to fit it into, as 16GiB, or a machine: h100."
)
@offline_option
@report_options
def command(
    model: str | None,
    layers: str | None,
    kv_heads: str | None,
    head_dim: str | None,
    sliding_layers: str | None,
    window: str | None,
    shared_layers: str | None,
    kv_dtype: str,
    tokens: str | None,
    sequences: str,
    shared_prefix: str,
    block_size: str,
    weights: str | None,
    workspace: str | None,
    memory: str | None,
    offline: bool,
    as_json: bool,
    explain: bool,
) -> None:
    """KV memory of MODEL, or of the layers, heads and dimensions given.

    MODEL is whatever `poise serve` takes, a config.json, or a known shape (llama-2-7b, llama-3.1-8b, mixtral-8x7b, …).
    """
    from poise.config import SchedulerConfig
    from poise.models import cost
    from poise.planner import memory as planner
    from poise.planner.hardware import memory_bytes
    from poise.planner.inputs import num_bytes, whole

    if kv_dtype not in cost.KV_FORMATS:
        known = ", ".join(cost.KV_FORMATS)
        raise ConfigError(f"--kv-dtype is {kv_dtype!r}: expected one of {known}")
    shape = {
        flag: None if text is None else whole(flag, text, 1, 1_000_000)
        for flag, text in (
            ("--layers", layers), ("--kv-heads", kv_heads), ("--head-dim", head_dim),
        )
    }  # fmt: skip
    known_weights = known_workspace = context = None
    if model is None:
        kv_layers = _given_layers(shape, sliding_layers, window, shared_layers, kv_dtype)
        subject = (
            f"{shape['--layers']} layers × {kv_layers.num_kv_heads} KV heads × {kv_layers.head_dim}"
        )
    else:
        for flag, text in (
            ("--sliding-layers", sliding_layers), ("--window", window), ("--shared-layers", shared_layers),
        ):  # fmt: skip
            if text is not None:
                raise ConfigError(f"{flag} {text}: MODEL says that itself; leave it or MODEL out")
        planned = planned_model(model, offline)
        planner.check_shape(planned.name, planned.config, *shape.values())
        kv_layers = planner.KVLayers.of(planned.config, kv_dtype)
        subject, context = planned.name, planned.config.max_position_embeddings
        known_weights = (planned.weight_bytes, planned.weights_from)
        rows = SchedulerConfig().max_num_batched_tokens
        known_workspace = (
            cost.workspace_bytes(planned.config, rows),
            f"about: float32 activations of {rows} tokens a step and {cost.LOGIT_TILE} rows of logits; scratch of threads comes on top",
        )
    demand = planner.Demand(
        num_tokens=whole("--tokens", tokens or context or 2048, 1, planner.LONGEST),
        num_sequences=whole("--sequences", sequences, 1, planner.LONGEST),
        shared_prefix=whole("--shared-prefix", shared_prefix, 0, planner.LONGEST),
        weights=known_weights if weights is None else (num_bytes("--weights", weights), "as given"),
        workspace=known_workspace if workspace is None else (num_bytes("--workspace", workspace), "as given"),
        memory=None if memory is None else memory_bytes("--memory", memory),
        context=context,
    )  # fmt: skip
    size = whole("--block-size", block_size, 1, 65_536)
    show(planner.plan(subject, kv_layers, size, demand), as_json, explain)


def _given_layers(
    shape: dict[str, int | None],
    sliding_layers: str | None,
    window: str | None,
    shared_layers: str | None,
    dtype: str,
) -> KVLayers:
    """Layers from flags alone; all three numbers are needed."""
    from poise.planner.inputs import whole
    from poise.planner.memory import KVLayers

    total, heads, head_dim = shape.values()
    if total is None or heads is None or head_dim is None:
        missing = ", ".join(flag for flag, value in shape.items() if value is None)
        raise ConfigError(f"give MODEL, or {missing} too")
    sliding = whole("--sliding-layers", sliding_layers or 0, 0, total)
    shared = whole("--shared-layers", shared_layers or 0, 0, total - 1)
    if sliding + shared > total:
        raise ConfigError(
            f"--sliding-layers {sliding} and --shared-layers {shared} are more than --layers {total}"
        )
    if (sliding > 0) != (window is not None):
        raise ConfigError("--sliding-layers and --window belong together")
    width = whole("--window", window, 1) if window is not None else None
    windows = (None,) * (total - sliding - shared) + (width,) * sliding
    return KVLayers(windows, heads, head_dim, dtype, shared)
