"""`poise inspect`: what a model file holds and what serving it costs, without loading it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from poise.cli.options import model_argument, settings_options
from poise.config import ModelSource, Settings

if TYPE_CHECKING:
    from poise.planner.report import Report
    from poise.weights.checkpoint import Checkpoint

LAYER_TENSORS = (
    "attn_norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o",
    "attn_post_norm", "mlp_norm", "gate", "up", "down", "mlp_post_norm",
)  # fmt: skip


@click.command("inspect")
@model_argument
@settings_options(ModelSource)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(settings: Settings, as_json: bool) -> None:
    """Show MODEL's architecture, tensor types, and bytes per token."""
    from rich.console import Console

    from poise.engine.build import open_source

    checkpoint = open_source(settings.source, console=Console(stderr=True))
    facts = inspect_checkpoint(checkpoint)
    if as_json:
        import json

        click.echo(json.dumps(facts, indent=2))
    else:
        click.echo("\n".join(describe(facts, memory_budget(checkpoint))))


def inspect_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts `--json` prints; bytes are bytes, counts are counts."""
    config = checkpoint.config
    types: Counter[str] = Counter()
    parameters = 0
    names = ["embed", "norm", "lm_head"]
    for layer in range(config.num_layers):
        names += [f"layers.{layer}.{name}" for name in LAYER_TENSORS]
    for name in filter(checkpoint.has, names):
        tensor = checkpoint.tensor(name)
        types[tensor.type] += 1
        count = 1
        for extent in tensor.shape:
            count *= extent
        parameters += count
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": config.architecture,
        "parameters": parameters,
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "windows": list(config.windows),
        "tied_output": config.tie_word_embeddings,
        "rope_theta": config.rope.theta,
        "tensor_types": dict(types.most_common()),
        **{figure.name: figure.value for figure in memory_budget(checkpoint).figures},
        "tokenizer": _tokenizer_kind(checkpoint),
        "chat_template": checkpoint.tokenizer.chat_template is not None,
        "sha256": checkpoint.digest(),
    }


def memory_budget(checkpoint: Checkpoint) -> Report:
    """Weights and KV in the words of `poise plan kv`."""
    from poise.planner import memory
    from poise.planner.report import Report

    budget = Report("kv", "")
    layers = memory.KVLayers.of(checkpoint.config)
    memory.add_weights_figure(budget, checkpoint.weight_bytes(), "as stored")
    memory.add_token_figure(budget, layers)
    memory.add_sequence_figure(budget, layers, 1000, "kv_bytes_per_1k_tokens")
    memory.add_sequence_figure(budget, layers, checkpoint.config.max_position_embeddings)
    memory.add_token_figure(
        budget,
        memory.KVLayers.of(checkpoint.config, "int8"),
        "kv_bytes_per_token_int8",
        "KV of a token, int8",
    )
    return budget


def describe(facts: dict[str, Any], budget: Report) -> list[str]:
    """The same facts for people."""
    from poise.planner.report import show

    types = ", ".join(f"{count} {name}" for name, count in facts["tensor_types"].items())
    attention = (
        f"{facts['num_heads']} query and {facts['num_kv_heads']} KV heads of {facts['head_dim']}"
    )
    if limited := [window for window in facts["windows"] if window is not None]:
        attention += f"; {len(limited)} layers see {max(limited):,} tokens back"
    output = "the embedding (tied)" if facts["tied_output"] else "a matrix of its own"
    lines = {
        "model": f"{facts['name']} ({facts['path']})",
        "format": facts["format"],
        "architecture": f"{facts['architecture']}, {facts['parameters'] / 1e6:,.1f} M parameters",
        "layers": f"{facts['num_layers']} of width {facts['hidden_size']:,}, MLP {facts['intermediate_size']:,}",
        "attention": attention,
        "output": output,
        "context": f"{facts['context']:,} tokens, rope theta {facts['rope_theta']:,.0f}",
        "vocabulary": f"{facts['vocab_size']:,} tokens, {facts['tokenizer']}",
        "chat template": "yes" if facts["chat_template"] else "no",
        "tensors": types,
        **{figure.label: show(figure.value, figure.unit) for figure in budget.figures},
        "sha256": facts["sha256"],
    }
    width = max(map(len, lines))
    return [f"{key:<{width}}  {value}" for key, value in lines.items()]


def _tokenizer_kind(checkpoint: Checkpoint) -> str:
    data = checkpoint.tokenizer
    if data.tokenizer_json is not None:
        return "tokenizer.json"
    model = data.gguf.get("tokenizer.ggml.model", "unknown")
    pre = data.gguf.get("tokenizer.ggml.pre")
    return f"GGUF {model}" + (f", pre-tokeniser {pre}" if pre else "")
