"""config.json of a Hugging Face folder as a ModelConfig.

Knows LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM
under transformers' key names and defaults. Invariant: a setting that would change the answer and is not understood is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from poise.errors import ModelFileError
from poise.models.config import ModelConfig, RopeConfig

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
# Settings that no model here has, with the values that switch them off.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "is_encoder_decoder": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
}
_SILU: tuple[object, ...] = (None, "silu")
_GELU: tuple[object, ...] = (None, "gelu_pytorch_tanh")
MAX_LAYERS = 1 << 12  # that are looked at: a folder with fewer tensors fails at its first gap
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


def model_config(fields: JSONFields, *, qkv_bias: bool, embedding_type: str = "F32") -> ModelConfig:
    """The configuration; whether q, k and v have biases, and how embeddings are stored, is what the
    tensors say.
    """
    architecture = _architecture(fields)
    is_gemma3 = architecture == "gemma3"
    activation = {"hidden_act": _SILU}
    if is_gemma3:
        activation = dict.fromkeys(("hidden_activation", "hidden_act"), _GELU)
    for key, neutral in (_NEUTRAL | activation).items():
        value = fields.values.get(key)
        if value not in neutral:
            fields.fail(key, f"is {_short(value)}, which is not supported")
    context = fields.count("max_position_embeddings")
    if not is_gemma3:
        _check_windows(fields, context)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    head_dim = fields.count(
        "head_dim",
        {"qwen3": 128, "gemma3": 256}.get(architecture, max(hidden_size // num_heads, 1)),
    )
    gemma3 = _gemma3_settings(fields, head_dim, embedding_type) if is_gemma3 else {}
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
        rope=gemma3.pop("rope", None) or _rope_config(fields, head_dim),
        tie_word_embeddings=bool(fields.values.get("tie_word_embeddings", is_gemma3)),
        qkv_bias=qkv_bias or architecture == "qwen2",
        qk_norm=architecture in ("qwen3", "gemma3"),
        **gemma3,
    )


def _gemma3_settings(fields: JSONFields, head_dim: int, embedding_type: str) -> dict[str, Any]:
    """What a `ModelConfig` says of Gemma 3 alone, and its rope, of which it has two.

    The embedding's scale is √hidden, rounded to the type of the weights as the model was trained.
    """
    scale = np.float32(math.sqrt(fields.count("hidden_size")))
    if embedding_type == "BF16":
        bits = scale.view(np.uint32)
        scale = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    elif embedding_type == "F16":
        scale = np.float32(np.float16(scale))
    rope, local = _rope_pair(fields, head_dim)
    return {
        "post_norms": True,
        "embedding_scale": float(scale),
        "query_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "windows": _windows(fields),
        "rope": rope,
        "local_rope": local,
    }


def _windows(fields: JSONFields) -> tuple[int | None, ...]:
    """The window of each layer, None for those that see everything."""
    window = min(fields.count("sliding_window", 4096), fields.count("max_position_embeddings"))
    num_layers = fields.count("num_hidden_layers")
    listed = fields.values.get("layer_types")
    if listed is None:
        period = fields.count("sliding_window_pattern", 6)
        slides = [(layer + 1) % period != 0 for layer in range(min(num_layers, MAX_LAYERS))]
    elif isinstance(listed, list) and len(listed) == num_layers:
        for layer_type in listed:
            if layer_type not in ("full_attention", "sliding_attention"):
                fields.fail("layer_types", f"has {_short(layer_type)}, which is not supported")
        slides = [layer_type == "sliding_attention" for layer_type in listed]
    else:
        fields.fail("layer_types", f"is no list of {num_layers} layers")
    return tuple(window if slide else None for slide in slides)


def _rope_pair(fields: JSONFields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Rope of layers that see everything, and of those with a window."""
    thetas = fields.number("rope_theta", 1e6), fields.number("rope_local_base_freq", 10000.0)
    if fields.values.get("rope_parameters") is None:
        wide = RopeConfig(thetas[0], head_dim)
        if fields.values.get("rope_scaling") is not None:
            wide = _rope_section(fields.section("rope_scaling"), thetas[0], head_dim)
        return wide, RopeConfig(thetas[1], head_dim)
    sections = fields.section("rope_parameters")
    wide, local = (
        _rope_section(sections.section(kind), theta, head_dim)
        for kind, theta in zip(("full_attention", "sliding_attention"), thetas)
    )
    return wide, local


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
    return _rope_section(fields.section(key), theta, head_dim)


def _rope_section(section: JSONFields, theta: float, head_dim: int) -> RopeConfig:
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
