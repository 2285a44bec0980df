"""Makes tests/data/tiny_*: tiny random models saved by transformers, and the logits that transformers computes in f32.

Needs torch and transformers, which poise itself and its tests do not: run `python tests/make_goldens.py` in an environment
that has them, numpy and gguf (names of folders limit it to these). Each folder holds config.json, model.safetensors and golden.npz. For sequence i golden.npz
has `tokens_i` int32 [n], `rows_i` int32 [r] (positions) and `logits_i` float32 [r, vocabulary].
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

from tiny_models import LLAMA3_SCALING, TinyModel

DATA = Path(__file__).parent / "data"
MODELS = {
    "tiny_llama": TinyModel(
        "llama",
        vocab_size=128,
        intermediate_size=64,
        rope_scaling=LLAMA3_SCALING,
        seed=1,
    ),
    "tiny_qwen2": TinyModel(
        "qwen2",
        vocab_size=128,
        intermediate_size=96,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        seed=2,
    ),
    "tiny_qwen3": TinyModel(
        "qwen3",
        vocab_size=128,
        intermediate_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        seed=3,
    ),
    "tiny_gemma3": TinyModel(
        "gemma3",
        vocab_size=128,
        intermediate_size=64,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        seed=4,
        window_period=3,
    ),
}
SEQUENCE_LENGTHS = (1, 17, 70, 300)
MAX_ROWS = 20


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        tiny = MODELS[name]
        model = build(tiny)
        model.save_pretrained(DATA / name)
        (DATA / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(DATA / name / "golden.npz", **golden(model, tiny))
        print(name, f"largest |logit| {max_logit(DATA / name / 'golden.npz'):.2f}")


def build(tiny: TinyModel) -> transformers.PreTrainedModel:
    """The transformers model with the tiny model's weights, float32, eager attention."""
    settings = tiny.config_json()
    del settings["architectures"]
    config = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    state = {name: torch.from_numpy(values) for name, values in tiny.stored_weights().items()}
    if tiny.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.eval()


def golden(model: transformers.PreTrainedModel, tiny: TinyModel) -> dict[str, np.ndarray]:
    """Logits of random sequences: all rows of short ones, the last rows of long ones."""
    random = np.random.default_rng(tiny.seed)
    arrays: dict[str, np.ndarray] = {}
    for index, length in enumerate(SEQUENCE_LENGTHS):
        tokens = random.integers(0, tiny.vocab_size, length).astype(np.int32)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens).long()[None]).logits[0].numpy()
        rows = np.arange(max(0, length - MAX_ROWS), length, dtype=np.int32)
        arrays |= {
            f"tokens_{index}": tokens,
            f"rows_{index}": rows,
            f"logits_{index}": logits[rows],
        }
    return arrays


def max_logit(path: Path) -> float:
    with np.load(path) as arrays:
        return max(float(np.abs(arrays[f"logits_{i}"]).max()) for i in range(len(SEQUENCE_LENGTHS)))


if __name__ == "__main__":
    main()
