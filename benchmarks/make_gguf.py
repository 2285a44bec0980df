"""Writes a GGUF file of a well-known shape with random weights, so that poise and llama.cpp can run the same file.

    python benchmarks/make_gguf.py llama-3.2-1b Q4_K_M llama-1b-q4_k_m.gguf

Containers are GGML's types (Q4_K, Q8_0, BF16, …) and Q4_K_M, llama.cpp's mix. The weights are those of `--load-format dummy`;
the tokenizer is that of a named model, with made-up tokens up to the shape's vocabulary. Nothing is held but one tensor.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import gguf
import numpy as np

from poise.errors import PoiseError
from poise.models.config import ModelConfig
from poise.weights.dummy_checkpoint import DummyCheckpoint, dummy_checkpoint
from poise.weights.dummy_shapes import SHAPES
from poise.weights.gguf_checkpoint import file_names
from poise.weights.open_checkpoint import open_checkpoint
from poise.weights.pull import resolve_model

NORMAL = 1  # type of a token
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9} | {
    "Q4_K": 14, "Q4_K_M": 15, "Q5_K": 16, "Q6_K": 18, "BF16": 32
}  # fmt: skip


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("container", type=click.Choice(list(FILE_TYPES)))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--tokenizer-of", default="smollm2-135m", show_default=True,
              help="Named model or GGUF file whose tokenizer the file gets.")  # fmt: skip
def main(shape: str, container: str, out: Path, tokenizer_of: str) -> None:
    """Write a random GGUF file."""
    try:
        checkpoint = dummy_checkpoint(shape, container)
        tokenizer = open_checkpoint(resolve_model(tokenizer_of)).tokenizer.gguf
    except PoiseError as error:
        sys.exit(f"make_gguf: {error}")
    write(checkpoint, FILE_TYPES[container], tokenizer, out)
    click.echo(f"{out}: {out.stat().st_size:,} bytes, weights {checkpoint.weight_bytes():,}")


def write(
    checkpoint: DummyCheckpoint, file_type: int, tokenizer: dict[str, object], out: Path
) -> None:
    """The file, tensor by tensor."""
    config = checkpoint.config
    writer = gguf.GGUFWriter(out, config.architecture)
    writer.add_name(checkpoint.name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_config(writer, config)
    add_tokenizer(writer, tokenizer, config.vocab_size)
    rename = file_names(config.num_layers)
    for name in checkpoint.names:
        shape, type_name, num_bytes = checkpoint.layout(name)
        kind = gguf.GGMLQuantizationType[type_name]
        byte_shape = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(rename[name], byte_shape, np.dtype(np.uint8), num_bytes, kind)
    factors = np.array(config.rope.factors or (), np.float32)
    if len(factors):
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in checkpoint.names:
        writer.write_tensor_data(checkpoint.tensor(name).data)
    if len(factors):
        writer.write_tensor_data(factors)
    writer.close()


def add_config(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """The shape under llama.cpp's keys."""
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rope.dim)
    writer.add_vocab_size(config.vocab_size)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, object], vocab_size: int) -> None:
    """The tokenizer's metadata; ids past its tokens get made-up names that no text is cut into."""
    tokens, types = tokenizer["tokenizer.ggml.tokens"], tokenizer["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(types, list)
    made_up = [f"<made_up_{number}>" for number in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model(str(tokenizer["tokenizer.ggml.model"]))
    writer.add_tokenizer_pre(str(tokenizer["tokenizer.ggml.pre"]))
    writer.add_token_list(tokens + made_up)
    writer.add_token_types(types + [NORMAL] * len(made_up))
    writer.add_token_merges(tokenizer["tokenizer.ggml.merges"])
    for role in ("bos", "eos", "unknown", "padding"):
        key = f"tokenizer.ggml.{role}_token_id"
        if isinstance(token := tokenizer.get(key), int):
            writer.add_uint32(key, token)
    writer.add_add_bos_token(False)
    if isinstance(template := tokenizer.get("tokenizer.chat_template"), str):
        writer.add_chat_template(template)


if __name__ == "__main__":
    main()
