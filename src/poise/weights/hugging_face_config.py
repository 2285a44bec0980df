"""config.json of a Hugging Face folder as a ModelConfig.

Knows LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM under transformers'
key names and defaults. Invariant: a setting that would change the answer and is not understood is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from poise.errors import ModelFileError
from poise.models.config import ModelConfig, RopeConfig

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Settings that no model here has, with the values that switch them off.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1.0),
    "is_encoder_decoder": (None, False),
}
_ROPE_TYPES = "default, linear, llama3"


class JSONFields:
    """Typed, checked access to a JSON object; every failure names file and key."""

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {self.prefix + key!r} {problem}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; required where there is no default. Null counts as missing."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(key, f"is {value!r}; a positive whole number is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number; required where there is no default. Null counts as missing."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
            self.fail(key, f"is {value!r}; a positive number is needed")
        return float(value)  # type: ignore[arg-type]

    def section(self, key: str) -> JSONFields:
        value = self.values.get(key)
        if not isinstance(value, dict):
            self.fail(key, f"is {value!r}; an object is needed")
        return JSONFields(self.path, value, f"{self.prefix}{key}.")


def model_config(fields: JSONFields, *, qkv_bias: bool) -> ModelConfig:
    """The configuration; whether q, k and v have biases is what the tensors say."""
    architecture = _architecture(fields)
    for key, neutral in _NEUTRAL.items():
        value = fields.values.get(key)
        if value not in neutral:
            fields.fail(key, f"is {_short(value)}, which is not supported")
    context = fields.count("max_position_embeddings")
    _check_windows(fields, context)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    head_dim = fields.count(
        "head_dim", 128 if architecture == "qwen3" else max(hidden_size // num_heads, 1)
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.count(
            "num_key_value_heads", num_heads if architecture == "llama" else None
        ),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=context,
        rope=_rope_config(fields, head_dim),
        tie_word_embeddings=bool(fields.values.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias or architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )


def _architecture(fields: JSONFields) -> str:
    listed = fields.values.get("architectures")
    name = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        fields.fail(
            "architectures",
            f"is {_short(listed)}, which is not supported (supported: {', '.join(_ARCHITECTURES)})",
        )
    return _ARCHITECTURES[name]


def _check_windows(fields: JSONFields, context: int) -> None:
    """Sliding windows are refused unless switched off or as long as the context."""
    layer_types = fields.values.get("layer_types")
    if isinstance(layer_types, list):
        for layer_type in layer_types:
            if layer_type != "full_attention":
                fields.fail("layer_types", f"has {layer_type!r}; only full_attention is supported")
    window = fields.values.get("sliding_window")
    if window is None or fields.values.get("use_sliding_window") is False:
        return
    architecture = fields.values.get("architectures")
    if architecture != ["MistralForCausalLM"] and not fields.values.get("use_sliding_window"):
        return  # the qwen families look at the window only if use_sliding_window says so
    if not isinstance(window, int) or window < context:
        fields.fail("sliding_window", f"is {window!r}; sliding windows are not supported")


def _rope_config(fields: JSONFields, head_dim: int) -> RopeConfig:
    """Rotary settings under transformers 5's `rope_parameters` or the older `rope_scaling` +
    `rope_theta`.
    """
    theta = fields.number("rope_theta", 10000.0)
    key = "rope_parameters" if fields.values.get("rope_parameters") is not None else "rope_scaling"
    if fields.values.get(key) is None:
        return RopeConfig(theta, head_dim)
    section = fields.section(key)
    theta = section.number("rope_theta", theta)
    if section.values.get("partial_rotary_factor") not in (None, 1.0):
        section.fail("partial_rotary_factor", "is not 1, which is not supported")
    rope_type = section.values.get("rope_type", section.values.get("type", "default"))
    if rope_type == "default":
        return RopeConfig(theta, head_dim)
    if rope_type == "linear":
        return RopeConfig(theta, head_dim, (section.number("factor"),) * (head_dim // 2))
    if rope_type == "llama3":
        return RopeConfig(theta, head_dim, _llama3_factors(section, theta, head_dim))
    section.fail(
        "rope_type", f"is {_short(rope_type)}, which is not supported (supported: {_ROPE_TYPES})"
    )


def _llama3_factors(section: JSONFields, theta: float, head_dim: int) -> tuple[float, ...]:
    """Llama 3's frequency factors, each rounded to f32 as GGUF files keep them.

    transformers' `_compute_llama3_parameters`: long waves are stretched by `factor`, short ones
    kept, those between interpolated; there the new frequency is (1 − s)·f/factor + s·f, so f is
    divided by 1 / ((1 − s)/factor + s).
    """
    factor = section.number("factor")
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    context = section.number("original_max_position_embeddings")
    if high <= low:
        section.fail("high_freq_factor", f"is {high}, not above low_freq_factor {low}")
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(float(np.float32(1 / ((1 - smooth) / factor + smooth))))
    return tuple(factors)


def _short(value: object) -> str:
    """A value for a one-line message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
